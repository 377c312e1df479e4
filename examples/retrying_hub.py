"""A training run that uploads its weights to an unreliable server: only the call is repeated.

The server runs on this machine and refuses two of the requests, as the Hugging Face Hub does when
it is busy. Run it: `python examples/retrying_hub.py`.
"""

import logging
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests
import torch

import healcore
from healcore import Healer


class FlakyHub(BaseHTTPRequestHandler):
    """Answers two uploads with 503 and asks to come back in a second."""

    refusals = 2
    uploads = 0

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if FlakyHub.refusals:
            FlakyHub.refusals -= 1
            self.send_response(503)
            self.send_header("Retry-After", "1")
        else:
            FlakyHub.uploads += 1
            self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        """The healer's lines say enough."""


def upload(url, weights):
    """One request; `healcore.retrying` repeats it."""
    requests.put(url, data=weights, timeout=10).raise_for_status()


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FlakyHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/model"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [torch.randn(32, 4) for _ in range(60)]
    state = {"model": model, "optimizer": optimizer}
    with (
        tempfile.TemporaryDirectory() as folder,
        Healer("default", state=state, store=folder) as healer,
    ):
        send = healcore.retrying(upload, healer)
        for x in healer.batches(batches):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if healer.step % 20 == 19:
                send(url, model.weight.detach().numpy().tobytes())
    server.shutdown()
    print(f"loss {loss.item():.3f}, uploads {FlakyHub.uploads}")


if __name__ == "__main__":
    main()
