"""The size of the code: lines per package, and the longest files. Fails if a file is over the limit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 350
SHOWN = 5


def main() -> int:
    sizes = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for room in ("kernels", "replica", "cluster")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and "build" not in path.parts
    }
    rooms: Counter[str] = Counter()
    for path, size in sizes.items():
        rooms["/".join(path.parts[:-1])] += size
    for room, size in sorted(rooms.items()):
        print(f"{size:6} {room}")
    longest = sorted(sizes.items(), key=lambda item: -item[1])[:SHOWN]
    print(f"{sum(sizes.values()):6} in all; longest: " + ", ".join(f"{path.name} {size}" for path, size in longest))
    too_long = [f"{path}: {size} lines, over {MAX_LINES}" for path, size in sizes.items() if size > MAX_LINES]
    print("\n".join(too_long), end="\n" if too_long else "")
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
