"""A bar on a terminal or in a notebook; in a pipe, where a bar would be noise, whoever shows progress says lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm


class Bar:
    """What shows progress: `bar` where somebody watches, otherwise None; closed on leaving."""

    def __init__(self, enabled: bool, **options: Any) -> None:
        self.enabled = enabled
        shown = enabled and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.bar: tqdm[Any] | None = tqdm(dynamic_ncols=True, **options) if shown else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
