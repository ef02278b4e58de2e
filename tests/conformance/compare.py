"""Print how each contender does in the cases: ``python -m tests.conformance.compare [CONTENDER ...]``.

A report, never a failure: torch's own checkpoint is not ours to judge, it is what ours is compared with.
"""

from __future__ import annotations

import sys

from tests.conformance import contenders
from tests.conformance.isolation import CASES, CaseServer


def outcome(result: dict[str, str]) -> str:
    """One word per result; a case's own message begins with the kind of its failure."""
    if result["status"] == "ok":
        return "ok"
    for start, word in (("WRONG", "wrong value"), ("REFUSED", "refused"), ("UNCLEAR", "unclear error")):
        if result["message"].startswith(start):
            return word
    return result["status"]


def main(names: list[str]) -> None:
    for name in names:
        contenders.contender(name)
    cases = sorted(path.stem for path in CASES.glob("[0-9]*.py"))
    server = CaseServer()
    table = {case: [outcome(server.run(f"case:{case}", name)) for name in names] for case in cases}
    server.close()
    print(f"{'case':42s}" + "".join(f"{name:>16s}" for name in names))
    for case, row in table.items():
        print(f"{case:42s}" + "".join(f"{word:>16s}" for word in row))
    passed = [sum(row[n] == "ok" for row in table.values()) for n in range(len(names))]
    print(f"{f'ok, of {len(cases)}':42s}" + "".join(f"{n:>16d}" for n in passed))


if __name__ == "__main__":
    main(sys.argv[1:] or ["plain", "torch", "checkpoint"])
