"""Fixtures of all outside tests: the contender, "bitwise equal to plain", and a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.conformance import contenders
from tests.conformance.equality import Program, assert_equal_to_plain
from tests.conformance.isolation import CaseServer

# In CI the same examples every time: what is new is found at home, not by somebody else's change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contender",
        default="checkpoint",
        help=f"what the outside tests run against, separated by commas: {', '.join(contenders.CONTENDERS)}",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contender_name" in metafunc.fixturenames and not _parametrized_by_hand(metafunc):
        metafunc.parametrize("contender_name", metafunc.config.getoption("--contender").split(","), scope="session")


def _parametrized_by_hand(metafunc: pytest.Metafunc) -> bool:
    return any("contender_name" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))


@pytest.fixture
def contender(contender_name: str) -> Any:
    """The implementation under test: ``checkpoint(fn, *args, **kwargs)`` and ``wrap(module)``."""
    return contenders.contender(contender_name)


@pytest.fixture
def equal_to_plain(contender: Any) -> Callable[..., None]:
    """``equal_to_plain(program)``: a program run with the contender has the bits of a plain run (see ``equality``)."""

    def check(program: Program, *, runs: int = 1) -> None:
        assert_equal_to_plain(contender, program, runs=runs)

    return check


@pytest.fixture(scope="session")
def case_server() -> Iterator[CaseServer]:
    server = CaseServer()
    yield server
    server.close()


@pytest.fixture
def isolated(case_server: CaseServer, contender_name: str) -> Callable[..., None]:
    """``isolated(function)``: run ``function(contender)`` in a process of its own; its assertions come back as ours."""

    def run(function: Callable[[Any], None], *, timeout_s: float = 120.0) -> None:
        target = f"{function.__module__}:{function.__qualname__}"
        result = case_server.run(target, contender_name, timeout_s=timeout_s)
        assert result["status"] == "ok", result["message"]

    return run


@pytest.fixture
def elbowroom_only(contender_name: str) -> None:
    """For tests of our own introspection: there is nothing to ask the other contenders."""
    if contender_name in ("plain", "torch"):
        pytest.skip(f"{contender_name} has no tape to look into")
