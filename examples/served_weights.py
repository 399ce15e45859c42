"""A Transformers model in training, and an inference server that follows it by its weight-update request.

    pip install 'gradwire[trainer]' safetensors
    python examples/served_weights.py

The trainer saves checkpoints of a tiny GPT-2 (random weights: nothing is downloaded) and publishes each. A follower
keeps ``served/model.safetensors`` up to date by patches, and after each asks the server to load the folder, by the
request that SGLang documents:

    POST /update_weights_from_disk   {"model_path": "served"}   ->   {"success": true, "message": "..."}

The server here answers it and ``POST /generate`` on the CPU. To use one of your own, start it with the folder of the
first step and name its address by ``--engine http://host:30000``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gradwire as gw


def build() -> GPT2LMHeadModel:
    """Build the model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).bfloat16()


class Engine:
    """An inference server on the CPU, with the two requests."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer a request."""
        if path == "/update_weights_from_disk":
            try:
                model = GPT2LMHeadModel.from_pretrained(asked["model_path"], dtype=torch.bfloat16)
            except (KeyError, OSError, ValueError) as error:
                return {"success": False, "message": str(error)}
            # Between two requests for text: none sees weights of two steps.
            with self._lock:
                self.model = model
            return {"success": True, "message": f"loaded {asked['model_path']}"}
        if path == "/generate":
            with self._lock, torch.no_grad():
                found = self.model.generate(torch.tensor([asked["input_ids"]]), max_new_tokens=8, do_sample=False)
            return {"output_ids": found[0].tolist()}
        return {"success": False, "message": f"{path} is not served"}


def serve(engine: Engine) -> ThreadingHTTPServer:
    """Serve an engine on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(engine.answer(self.path, asked)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def post(url: str, **asked: Any) -> dict[str, Any]:
    """Send a request, and return its answer."""
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    """Train, publish, follow and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engine", help="Address of a server; by default one on the CPU is started")
    parser.add_argument("--where", help="A folder or URL to publish to; by default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place, served = arguments.where or str(folder / "published"), folder / "served"
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127)
        publisher, subscriber, address, server = None, gw.WeightSubscriber(served, place), arguments.engine, None
        for step in range(arguments.steps):
            checkpoint = folder / f"checkpoint-{step}"
            model.save_pretrained(checkpoint)
            publisher = publisher or gw.WeightPublisher(checkpoint, place)
            told = publisher.publish(step, checkpoint)
            # In another process, and on another machine, this is: gradwire subscribe --from PLACE --to served --watch
            subscriber.update()
            shutil.copy(checkpoint / "config.json", served)
            if address is None:
                server = serve(Engine(served))
                address = f"http://127.0.0.1:{server.server_port}"
            answer = post(f"{address}/update_weights_from_disk", model_path=str(served))
            prompt = text[:8].tolist()
            generated = post(f"{address}/generate", input_ids=prompt)["output_ids"]
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
            print(
                f"step {step}: {told.patch_bytes or told.anchor_bytes} bytes, {answer['message']}, "
                f"the trainer's text: {generated == expected}",
                flush=True,
            )
            optimizer.zero_grad()
            rows = torch.stack([text[i : i + 32] for i in range(step * 64, step * 64 + 256, 32)])
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
        if server is not None:
            server.shutdown()


if __name__ == "__main__":
    main()
