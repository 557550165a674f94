"""An engine of known behaviour, as a program: speaks /v1/completions over real HTTP, and fails as it is told.

    python scripted_engine.py --port N [--fault NAME] [--after REQUESTS] [--pace SECONDS]

Not a mock object: it is a process with a log, children and memory of its own, so that whatever watches it is what
watches a real one. Needs the standard library only. Answers are a function of the prompt and the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = (
    "none", "crash at start", "crash in request", "hang", "stops answering", "ignores SIGTERM", "leaves children",
    "leaks memory", "wrong kernel", "slow start", "rambles", "throttled", "zombies", "nan logprobs", "truncates",
    "no determinism", "first token never", "refuses", "half answer", "ignores filters", "logprobs times 1.5",
    "loses letters", "mixed streams", "cut streams", "falls back", "canned streams", "streams lose letters",
    "one answer", "does not support it", "has no memory for it",
)  # fmt: skip
CHILD = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep({seconds})"
leaked: list[bytearray] = []
lock = threading.Lock()
served = 0
streamed = 0


BEST = 0.7  # the probability of the first of two tokens
vocabulary: dict[int, str] = {i: f" w{i}" for i in range(1000)}
texts: dict[str, list[int]] = {}  # whose tokens are known


def pairs(prompt: Any, count: int) -> list[tuple[int, int]]:
    """The two tokens that may come at each place."""
    draw = random.Random(hashlib.sha256(json.dumps(prompt).encode()).digest())
    ids = sorted(vocabulary)
    return [(ids[(k := draw.randrange(len(ids)))], ids[k - 1]) for _ in range(count)]


def answer(prompt: Any, asked: dict[str, Any], count: int, filters: bool = True) -> list[int]:
    """The better token of each pair; if it is sampled, by the seed, the other in three of ten cases. Bias and penalties
    move the two logits first."""
    sampled = asked.get("temperature", 1.0) > 0
    if filters and (asked.get("top_p", 1) < BEST or asked.get("top_k", 2) == 1 or asked.get("min_p", 0) > 3 / 7):
        sampled = False
    draw = random.Random(f"{json.dumps(prompt)}/{asked.get('seed', 0)}")
    bias, ids = asked.get("logit_bias", {}) if filters else {}, []
    for pair in pairs(prompt, count):
        logits = []
        for token, share in zip(pair, (BEST, 1 - BEST)):
            seen = ids.count(token) if filters else 0
            lost = asked.get("presence_penalty", 0.0) * (seen > 0) + asked.get("frequency_penalty", 0.0) * seen
            logits.append(math.log(share) + bias.get(str(token), 0.0) - lost)
        share = 1 / (1 + math.exp((logits[1] - logits[0]) / (asked.get("temperature") or 1.0)))
        ids.append(pair[draw.random() > share if sampled else logits[1] > logits[0]])
    return ids


def length_of(prompt: Any) -> int:
    """How long the whole answer to a prompt is, before anything ends it."""
    return 8 + hashlib.sha256(json.dumps(prompt).encode()).digest()[0] % 9


class Engine(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        super().__init__(("127.0.0.1", options.port), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.options.fault == "stops answering" and served > self.server.options.after:
            time.sleep(3600)
        if self.path == "/health":
            self.reply({"status": "ok"})
        elif self.path == "/v1/models":
            self.reply({"data": [{"id": "scripted"}]})
        else:
            self.reply({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        global served
        if self.path != "/v1/completions":
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply({"error": "no such API"}, 404)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            served += 1
            due = served > self.server.options.after
            alone = served == self.server.options.after + 1
        fault = self.server.options.fault if due else "none"
        if fault == "first token never":
            time.sleep(3600)
        if fault == "crash in request":
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
            os._exit(139)
        if fault == "stops answering" or (fault == "hang" and alone):  # a hang is of one request
            time.sleep(3600)
        if fault == "leaks memory":
            leaked.append(bytearray(os.urandom(1 << 20)) * 2)
        if fault == "zombies":
            subprocess.Popen([sys.executable, "-S", "-c", "pass"])  # and nobody waits for it
        self.complete(asked, fault)

    def complete(self, asked: dict[str, Any], fault: str) -> None:
        prompt, most = asked["prompt"], asked["max_tokens"]
        if isinstance(prompt, str):
            prompt = asked["prompt"] = texts.get(prompt, prompt)
        if fault == "no determinism":
            asked = {**asked, "seed": random.randrange(1 << 30), "temperature": 1.0}
        if fault == "canned streams" and asked.get("stream"):
            prompt = "canned"
        if fault == "mixed streams" and asked.get("stream"):
            prompt = [*prompt, 1] if isinstance(prompt, list) else f"{prompt}?"
        whole = length_of(prompt) * (6 if fault == "rambles" else 1)
        count = most if asked.get("ignore_eos") else min(most, whole)
        ids = answer(prompt, asked, count, fault != "ignores filters")
        if fault == "truncates" and len(ids) > 2:
            ids = ids[: len(ids) // 2]
        finish = "length" if count == most and (asked.get("ignore_eos") or whole != most) else "stop"
        pace = self.server.options.pace * (4 if fault == "throttled" else 1)
        sent = asked["prompt"]
        prompt_tokens = len(sent) if isinstance(sent, list) else max(1, len(sent) // 4)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count if fault == "truncates" else len(ids)}
        text = "".join(vocabulary[i] for i in ids)
        if fault == "loses letters":
            text = text[:3] + text[4:]
        ends = [text.index(stop) for stop in asked.get("stop", []) if stop in text and fault != "ignores filters"]
        end = min(ends, default=len(text))
        finish = "stop" if ends else finish
        if asked.get("stream"):
            self.stream(ids, usage, finish, pace, fault, end)
            return
        time.sleep(self.server.options.first + pace * max(0, len(ids) - 1))
        text = text[:end]
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
        choice["token_ids"] = ids
        if asked.get("logprobs") is not None:
            scale = {"nan logprobs": float("nan"), "logprobs times 1.5": 1.5}.get(fault, 1.0)
            both = pairs(prompt, len(ids))
            best, other = scale * math.log(BEST), scale * math.log(1 - BEST)
            values = [best if i == pair[0] else other for i, pair in zip(ids, both)]
            top = [{vocabulary[a]: best, vocabulary[b]: other} for a, b in both]
            names = [vocabulary[i] for i in ids]
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
        choices = [choice]
        for k in range(1, 1 if fault == "one answer" else asked.get("n", 1)):
            more = answer(prompt, {**asked, "seed": asked.get("seed", 0) + k}, count)
            choices.append({"index": k, "text": "".join(vocabulary[i] for i in more), "finish_reason": finish})
            usage["completion_tokens"] += len(more)
        self.reply({"choices": choices, "usage": usage})

    def stream(self, ids: list[int], usage: dict[str, int], finish: str, pace: float, fault: str, end: int) -> None:
        """`end`: letters of the text in front of a stop string."""
        global streamed
        with lock:
            streamed += 1
            cut = fault == "cut streams" and streamed % 50 == 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        begun = time.perf_counter()

        def event(value: Any) -> None:
            data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        for n, i in enumerate(ids):
            time.sleep(max(0.0, begun + self.server.options.first + n * pace - time.perf_counter()))
            text = vocabulary[i][:end]
            end -= len(text)
            if fault == "streams lose letters" and n == 3:
                text = text[:-1]
            event({"choices": [{"index": 0, "text": text, "token_ids": [i], "finish_reason": None}]})
            if cut and n >= len(ids) // 2:
                self.wfile.write(b"0\r\n\r\n")
                return
            if fault == "half answer" and n >= len(ids) // 2:
                os._exit(1)
        event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": finish}]})
        event({"choices": [], "usage": usage})
        event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--fault", choices=FAULTS, default="none")
    p.add_argument("--after", type=int, default=0, help="requests that are answered well before it begins")
    p.add_argument("--pace", type=float, default=0.0, help="seconds a token")
    p.add_argument("--first", type=float, default=0.0, help="seconds to the first token")
    p.add_argument("--moe", default="cutlass", help="the MoE kernel that its log names")
    p.add_argument("--vocab", help="a JSON file: id -> text")
    p.add_argument("--texts", help="a JSON file: text -> ids")
    a = p.parse_args()
    if a.vocab:
        with open(a.vocab, encoding="utf-8") as file:
            vocabulary.clear()
            vocabulary.update({int(k): v for k, v in json.load(file).items()})
    if a.texts:
        with open(a.texts, encoding="utf-8") as file:
            texts.update(json.load(file))
    if a.fault == "falls back":
        print("WARNING mxfp4.py:88] CUTLASS is not available here, falling back to Marlin.", flush=True)
    print(f"scripted engine, pid {os.getpid()}", flush=True)
    print(f"clock: {600 if a.fault == 'throttled' else 2100} of 2100 MHz", flush=True)
    print(f"Using {'marlin' if a.fault == 'wrong kernel' else a.moe} backend for the MoE", flush=True)
    if a.fault == "refuses":
        print("scripted: there is no kernel for these gates", file=sys.stderr, flush=True)
        return 2
    if a.fault in ("does not support it", "has no memory for it"):
        print("[core.py:1510] ValueError: moe_backend='marlin' is not supported for unquantized MoE.", flush=True)
        if a.fault == "has no memory for it":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr, flush=True)
        return 1
    if a.fault == "crash at start":
        print(
            "RuntimeError: No supported CUDA architectures found for major versions [10].", file=sys.stderr, flush=True
        )
        return 1
    if a.fault == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if a.fault == "leaves children":
        for session in (False, True):
            subprocess.Popen([sys.executable, "-S", "-c", CHILD.format(seconds=600)], start_new_session=session)
    if a.fault == "slow start":
        time.sleep(3600)
    engine = Engine(a)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    engine.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
