"""The simulated engine's profiler: a trace for each rank, as vLLM names them, without a kernel in it."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path


class Profiler:
    """Writes into ``folder`` what it recorded of ``ranks`` ranks between :meth:`start` and :meth:`stop`."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder = Path(folder)
        self._ranks = ranks
        self._lock = threading.Lock()
        self._began: float | None = None

    def start(self) -> None:
        """Begins to record, unless it does already."""
        with self._lock:
            self._began = self._began or time.time()

    def stop(self) -> None:
        """Ends, and writes the traces; nothing happens if nothing was recorded."""
        with self._lock:
            began, self._began = self._began, None
        if began is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._ranks):
            document = {"schemaVersion": 1, "simulated": True, "deviceProperties": [],
                        "distributedInfo": {"rank": rank, "world_size": self._ranks},
                        "traceEvents": [{"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans",
                                         "tid": "PyTorch Profiler", "ts": began * 1e6,
                                         "dur": (time.time() - began) * 1e6, "args": {"Op count": 0}}]}
            name = f"rank{rank}.{time.time_ns()}.pt.trace.json.gz"
            (self._folder / name).write_bytes(gzip.compress(json.dumps(document, indent=1).encode()))
