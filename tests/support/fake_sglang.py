"""A stand-in for ``sglang.launch_server``: health, counters and streamed chat, without a model.

Run as a script with the arguments of the real one. ``FAKE_SGLANG`` chooses a fault: ``dies`` (exits while starting),
``hangs`` (never healthy), ``differs`` (the plain server answers something else), ``no-counters``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULT = os.environ.get("FAKE_SGLANG", "")
IS_ASPIRE = "--spec-algorithm" in sys.argv
COUNTERS = {
    "steps": 0,
    "mixed_steps": 0,
    "draft_rows": 0,
    "verify_rows": 0,
    "drafts_verified": 0,
    "drafts_accepted": 0,
    "tokens_committed": 0,
    "draft_kv_tokens_read": 0,
    "draft_kv_tokens_full": 0,
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.send_response(503 if FAULT == "hangs" else 200)
            self.end_headers()
        elif self.path == "/server_info":
            state: dict[str, Any] = {"aspire": {"policy": "aspire", **COUNTERS}} if FAULT != "no-counters" else {}
            self._send("application/json", json.dumps({"internal_states": [state]}).encode())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0
        question = request["messages"][0]["content"].splitlines()[-1]
        words = ["Answer ", "to ", question if IS_ASPIRE or FAULT != "differs" else "nothing"]
        for name in COUNTERS:
            COUNTERS[name] += 4
        chunks = [{"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in words]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9 + len(words)}
        chunks.append({"choices": [], "usage": usage})
        common = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": request["model"]}
        events = "".join(f"data: {json.dumps(common | chunk)}\n\n" for chunk in chunks)
        self._send("text/event-stream", (events + "data: [DONE]\n\n").encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    # A worker that outlives its parent unless the whole process group is ended.
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"worker {worker.pid}", flush=True)
    if FAULT == "dies" and IS_ASPIRE:
        sys.exit("cannot serve: the reason is here")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
