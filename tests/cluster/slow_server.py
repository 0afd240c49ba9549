"""A server that answers its first question at once and the others late. It notes each answer in a file."""

import os
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from paellapy.cluster.processes import EngineTask, taken_task

TASK = taken_task()
assert isinstance(TASK, EngineTask)
LATE_S = 0.6
answers = Path(TASK.folder) / "answers"


class Late(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if answers.exists():
            time.sleep(LATE_S)
        with answers.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer((TASK.host, TASK.port), Late).serve_forever()
