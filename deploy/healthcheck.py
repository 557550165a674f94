"""Exit status 0 while the server takes requests: `healthcheck.py [PORT]`. Needs nothing but Python."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main(port: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as e:  # refused, 503, timed out, or no port at all
        print(e, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "8000"))
