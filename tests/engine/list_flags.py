"""Print the flags of `vllm serve`, one a line, as the vLLM that this interpreter imports takes them.

The files in `isambard_serve/engine_flags/` are made with it: long names only, sorted, without the leading
dashes, `no-…` negations included. For a release that cannot run here (a CUDA wheel), unpack the wheel, call
its version a CPU build's, and put it (and what it imports besides) before the CPU engine's own packages:

    pip download --no-deps --only-binary :all: vllm==0.33.0 && unzip -d wheel vllm-0.33.0-*.whl -x '*.so'
    sed -i 's/^Version: .*[0-9]$/&+cpu/' wheel/vllm-*.dist-info/METADATA
    pip install --no-deps --target wheel orjson
    PYTHONPATH=wheel "$(python -m tests.engine.environment)"/bin/python tests/engine/list_flags.py
"""

import argparse
import contextlib
import sys


def serve_flags() -> list[str]:
    """Return the long flags of the real `vllm serve` parser, sorted, without their leading dashes."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    subparsers = FlexibleArgumentParser().add_subparsers()
    parser: argparse.ArgumentParser = ServeSubcommand().subparser_init(subparsers)
    # Not each action's `option_strings`: 0.33 takes `--no-enable-x`, but hides it there.
    taken = parser._option_string_actions
    return sorted(option.removeprefix("--") for option in taken if option.startswith("--"))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # importing vLLM may log
        flags = serve_flags()
    print(*flags, sep="\n")
