"""Makes a random-weight two-layer Llama with a byte-level tokenizer, for tests of the serving protocol.

    python serving/tiny_model.py --out DIR [--context 4096]

Its words mean nothing, but everything around them is real: chat template, token counts, batching, prefix
caching, and replies that a JSON schema forces into shape. Needs torch and transformers, no network, and a
few seconds; the same seed always gives the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<|pad|>", "<|start|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(context_tokens: int) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte plus three specials, so any text is encoded without loss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(vocab_size: int, context_tokens: int, seed: int) -> LlamaForCausalLM:
    """Two layers of width 128 with 4 heads of 32: the smallest shapes that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context_tokens,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def make_tiny_model(out: Path, *, context_tokens: int = 4096, seed: int = 0) -> Path:
    """Writes the model into the folder `out`, made if absent, and returns it."""
    tokenizer = byte_tokenizer(context_tokens)
    model = tiny_llama(len(tokenizer), context_tokens, seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random-weight model for tests.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--context", type=int, default=4096, help="longest context in tokens (default 4096)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default 0)")
    args = parser.parse_args()
    make_tiny_model(args.out, context_tokens=args.context, seed=args.seed)


if __name__ == "__main__":
    main()
