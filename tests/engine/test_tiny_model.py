"""The tiny model: its files, its words, and the real engine serving it."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.engine import make_tiny_model
from tests.engine.serving import MODEL, Engine, environment

ROUND_TRIP = """
import random, sys
from tokenizers import Tokenizer
words, size = Tokenizer.from_file(sys.argv[1]), int(sys.argv[2])
assert sorted(words.get_vocab().values()) == list(range(size))
assert words.encode("w1 w2").ids == [1, 2]
for length in range(300):
    tokens = random.choices(range(size), k=length)
    assert words.encode(words.decode(tokens, skip_special_tokens=False)).ids == tokens, tokens
"""


def test_the_files_are_what_the_generator_makes() -> None:
    assert {path.name: path.read_text() for path in MODEL.iterdir()} == make_tiny_model.files()


def test_any_tokens_survive_decoding_and_encoding(engine_venv: Path) -> None:
    tokenizer, size = MODEL / "tokenizer.json", str(make_tiny_model.VOCABULARY)
    subprocess.run([engine_venv / "bin/python", "-c", ROUND_TRIP, tokenizer, size], check=True, timeout=60)


def test_the_engine_serves_it_and_the_benchmark_counts_every_token(engine_venv: Path, engine: Engine,
                                                                   tmp_path: Path) -> None:
    answer = engine.complete("nothing that it knows")
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 4, "completion_tokens": 3}
    result = _bench(engine_venv, engine, tmp_path, prompts=8)
    assert (result["completed"], result["failed"]) == (8, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * 64, 8 * 64)


def _bench(venv: Path, engine: Engine, folder: Path, *, prompts: int) -> dict[str, Any]:
    """Run `vllm bench serve` with 64 tokens in, 64 out and 4 requests at a time; give what it saved."""
    what = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "64"]
    how = ["--num-prompts", str(prompts), "--max-concurrency", "4", "--temperature", "0", "--ignore-eos"]
    where = ["--base-url", engine.url, "--model", "tiny", "--tokenizer", str(MODEL)]
    save = ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    command = [str(venv / "bin/vllm"), "bench", "serve", *where, *what, *how, *save]
    subprocess.run(command, env=environment(folder) | {"OPENAI_API_KEY": engine.key}, check=True, timeout=300)
    result: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return result
