"""Settings that must precede the first tensor operation of a test process."""

from __future__ import annotations

import os

# Some sandboxes advertise the AMX unit of the processor and then refuse its instructions, which ends the process in
# oneDNN's bfloat16 kernels; AVX-512 computes the same tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
