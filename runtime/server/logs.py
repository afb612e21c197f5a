"""The log: one JSON object a line on stderr. Of a request it says ids, counts and times, never what was asked or answered."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["configure"]


class _Lines(logging.Formatter):
    """{"time", "level", "event"/"message", …}; a line of the request log is JSON already and is only joined."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        if record.name == "enginewright.requests":
            return json.dumps(head)[:-1] + ", " + record.getMessage()[1:]
        line = {**head, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def configure(level: int = logging.INFO) -> None:
    """Send the logs of enginewright and uvicorn to stderr as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name in ("enginewright", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
