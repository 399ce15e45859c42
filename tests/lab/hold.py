"""``hold.py FOLDER``: starts a process that leaves its session, writes both process ids to FOLDER, and waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
escaped = subprocess.Popen(["sleep", "600"], start_new_session=True)
pending = folder / f"pending-{os.environ['RANK']}"
pending.write_text(f"{os.getpid()} {escaped.pid}")
pending.rename(folder / f"pids-{os.environ['RANK']}")
time.sleep(600)
