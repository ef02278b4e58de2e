"""Side-by-side costs: exact peaks, interleaved rounds."""

from __future__ import annotations

import time

import torch

from elbowroom.fitting.measure import measure_steps


def test_contenders_are_interleaved_and_each_measured_alone() -> None:
    order = []

    def small() -> None:
        order.append("small")
        torch.empty(1000, dtype=torch.uint8)

    def large() -> None:
        order.append("large")
        torch.empty(5000, dtype=torch.uint8)
        time.sleep(0.01)

    costs = measure_steps({"small": small, "large": large}, torch.device("cpu"), n_warmups=1, n_rounds=3)
    assert order == ["small", "large"] * 5
    assert (costs["small"].peak_bytes, costs["large"].peak_bytes) == (1000, 5000)
    assert len(costs["small"].rounds_s) == 3
    assert costs["large"].step_s >= 0.01 > costs["small"].step_s
    assert costs["large"].step_s == sorted(costs["large"].rounds_s)[1]
