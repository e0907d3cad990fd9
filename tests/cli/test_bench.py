from __future__ import annotations

import json


def test_bench_prints_a_table_and_writes_json(dale):
    done = dale("bench", "--synthetic", "--train-size", 48, "--batch-size", 16, "--steps", 2, "--timed-steps", 1,
                "--json", "bench.json")  # fmt: skip
    assert done.code == 0, done.err
    for word in ("images/s", "an epoch of 48", "share of the ceiling", "peak memory", "warm-up", "attack", "logging"):
        assert word in done.out
    with open("bench.json", encoding="utf-8") as file:
        found = json.load(file)
    assert found["steps"] == 1
    assert found["seed"] == 0
    assert found["config"]["objective"]["options"]["steps"] == 2


def test_bench_on_the_embedded_digits_takes_the_options_of_train(dale):
    done = dale("bench", "--algorithm", "erm", "--batch-size", 32, "--train-size", 64, "--timed-steps", 1)
    assert done.code == 0, done.err
    assert "erm, convnet, digits, batch 32" in done.out


def test_bench_refuses_in_one_line(dale):
    for options in (["--timed-steps", 0], ["--synthetic", "--dataset", "mine.npz"], ["--deterministic"]):
        done = dale("bench", *options)
        assert done.code == 2, options
        assert done.err.startswith("dale: error: ")
        assert done.err.count("\n") == 1
