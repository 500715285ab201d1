"""Make `jobs/tiny-model/`: a two-layer model of a few text files, for `vllm serve … --load-format dummy`.

Its words are `w0` to `w509`, each a token of that number, parted by spaces. What it decodes it also encodes
again, token for token, so a benchmark's prompts have exactly the length that was asked for. Any other word is
the token `<unk>`. Its answers are noise.
"""

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "jobs/tiny-model"
VOCABULARY = 512
HEAD_DIM = 80
"""An odd multiple of 16, with which vLLM leaves its AMX attention alone. 0.32 runs that without having asked
the kernel for the tiles, and dies of SIGILL at the first request.
"""
UNKNOWN, END = "<unk>", "<eos>"


def files() -> dict[str, str]:
    """Return the text of each file of the model by its name."""
    parts = {"config": _config(), "tokenizer": _tokenizer(), "tokenizer_config": _tokenizer_config()}
    return {f"{name}.json": json.dumps(part, indent=2) + "\n" for name, part in parts.items()}


def _words() -> list[str]:
    """List the vocabulary by token id, the two special tokens last: `w7` is token 7."""
    return [*(f"w{token}" for token in range(VOCABULARY - 2)), UNKNOWN, END]


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "vocab_size": VOCABULARY,
        "eos_token_id": _words().index(END),
        "tie_word_embeddings": True,
    }


def _tokenizer() -> dict[str, Any]:
    words = _words()
    exact = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words.index(token), "content": token} | exact for token in (UNKNOWN, END)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,  # joins with spaces
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": UNKNOWN,
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }


def main(folder: Path = FOLDER) -> None:
    """Write the model's files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
