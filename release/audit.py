"""Known vulnerabilities of what dpgrad installs: `pip-audit` on an environment, with an honest answer.

    python release/audit.py PYTHON [--offline]

Exit status 0: every dependency was looked up and none is known to be vulnerable. 1: some are. 3: the advisory service
did not answer for all of them, so nothing can be said; with --offline that is told and the exit status is 0.
"""

import argparse
import json
import subprocess
import sys


def installed(python: str) -> list[str]:
    """name==version of every package in an environment but dpgrad and pip."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    own = {"dpgrad", "pip"}
    return [
        f"{one['name']}=={one['version'].partition('+')[0]}"
        for one in json.loads(done.stdout)
        if one["name"] not in own
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the interpreter of the environment")
    parser.add_argument("--offline", action="store_true", help="accept that the service does not answer")
    given = parser.parse_args()
    packages = installed(given.python)
    command = [sys.executable, "-m", "pip_audit", "--requirement", "/dev/stdin", "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"],
        input="\n".join(packages), capture_output=True, text=True,
    )  # fmt: skip
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError, TypeError):
        found = []
    looked_up = [one for one in found if "skip_reason" not in one]
    vulnerable = [one for one in looked_up if one["vulns"]]
    for one in vulnerable:
        print(f"{one['name']} {one['version']}: {', '.join(each['id'] for each in one['vulns'])}")
    print(f"{len(looked_up)} of {len(packages)} packages were looked up, {len(vulnerable)} are known to be vulnerable")
    if vulnerable:
        return 1
    if len(looked_up) < len(packages):
        print("NOT AUDITED: the advisory service did not answer for every package", file=sys.stderr)
        return 0 if given.offline else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
