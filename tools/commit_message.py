"""Check messages of commits: a subject of at most 72 characters, an empty line, and a body that says why.

python tools/commit_message.py FILE checks the message in a file, as git's hook commit-msg passes it;
python tools/commit_message.py --since COMMIT those of the commits after COMMIT, merges aside. Exits with 1 where one
has an objection.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LONGEST = 72
# git writes these subjects itself, and rebasing removes the last three.
_BY_GIT = re.compile(r"Merge |Revert \"|fixup! |squash! |amend! ")
# Below this line git shows the change, with `commit --verbose`, and drops it.
_SCISSORS = re.compile(r"(?m)^# -+ >8 -+$")


def objections(message: str) -> list[str]:
    """What is wrong with a commit's message, a sentence each; none where nothing is. Lines with # are git's own."""
    text = _SCISSORS.split(message)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().split("\n")
    if _BY_GIT.match(subject):
        return []
    if not subject:
        return ["the message is empty"]
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, {LONGEST} at most: {subject}")
    if subject.endswith("."):
        found.append(f"the subject ends with a full stop: {subject}")
    if rest and rest[0]:
        found.append("the line after the subject is not empty")
    if not any(rest):
        found.append(f"there is no body that says why: {subject}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Check what the arguments name; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("file", nargs="?", type=Path, help="holds one message")
    asked.add_argument("--since", metavar="COMMIT", help="check the commits after this one, up to HEAD")
    args = parser.parse_args(arguments)
    messages: dict[str, str] = {}
    if args.since is None:
        messages[""] = args.file.read_text()
    else:
        log = ["git", "log", "--no-merges", "-z", "--format=%h%n%B", f"{args.since}..HEAD"]
        done = subprocess.run(log, capture_output=True, text=True)
        if done.returncode:
            parser.error(done.stderr.strip().partition("\n")[0])
        for entry in filter(None, done.stdout.split("\0")):
            commit, _, messages[f"{commit}: "] = entry.partition("\n")
    said = [f"{commit}{objection}" for commit, message in messages.items() for objection in objections(message)]
    print("\n".join(said), end="\n" if said else "", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
