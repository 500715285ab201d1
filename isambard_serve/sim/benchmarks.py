"""``bench serve`` as a module that is imported once: what a client uses of ``vllm.benchmarks.serve``."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

from isambard_serve.sim.client import Benchmark


class FlexibleArgumentParser:
    """Stands for vLLM's parser, and takes any flag as the simulation does."""

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:
        """The words as they are."""
        return argparse.Namespace(words=words)


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Adds nothing: any flag is taken."""


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, writes and prints the result, and returns it; cancelled, it takes its requests back."""
    benchmark = Benchmark(args.words, os.environ)
    try:
        return await asyncio.to_thread(benchmark.run)
    except asyncio.CancelledError:
        benchmark.stop()
        raise
