"""The cases drawn from public bug reports (``cases/``, listed in ``cases/LOG.md``), each in a process of its own.

They run through every way in: ``checkpoint``, ``wrap``, each ready policy, and with the proof on at every call.
``python -m tests.conformance.compare`` prints how other implementations do.
"""

from __future__ import annotations

import pytest

from tests.conformance.isolation import CASES, CaseServer

WAYS = ("checkpoint", "wrap", "keep-everything", "keep-matmuls", "keep-attention", "keep-half", "verify-always")
NAMES = sorted(path.stem for path in CASES.glob("[0-9]*.py"))

# Where the plain program is in error too (it writes over what its backward must read), only a named error is right.
ONLY_AN_ERROR_IS_RIGHT = {
    "019_argument_changed_after_forward": "elbowroom.errors.ChangedTensorError",
    "020_keyword_changed_after_forward": "elbowroom.errors.ChangedTensorError",
}


def test_every_case_is_in_the_log() -> None:
    log = (CASES / "LOG.md").read_text()
    assert len(NAMES) == 62
    assert [name for name in NAMES if f"| {name} |" not in log] == []


# wrap() takes modules only, and says so in its own words (test_kinds_interface.py).
NOT_FOR_WRAP = {"080_not_a_function"}
RUNS = [(name, way) for name in NAMES for way in WAYS if not (way == "wrap" and name in NOT_FOR_WRAP)]


@pytest.mark.parametrize(("name", "contender_name"), RUNS)
def test_case(case_server: CaseServer, name: str, contender_name: str) -> None:
    result = case_server.run(f"case:{name}", contender_name)
    assert result["status"] == "ok", result["message"]
    if name in ONLY_AN_ERROR_IS_RIGHT:
        assert result["raised"] is not None, "the program ran to its end with a changed tensor"
        # where everything is kept nothing is replayed, and the error is plain autograd's own
        assert ONLY_AN_ERROR_IS_RIGHT[name] in result["raised"] or contender_name == "keep-everything"
    else:
        assert result["raised"] is None, f"replay needs no excuse here, yet it raised {result['raised'][0]}"
