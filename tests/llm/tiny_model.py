"""A random-weight two-layer Llama with a byte-level tokenizer, for tests of the serving protocol.

Its words mean nothing, but everything around them is real: chat template, token counts, batching, prefix
caching, and replies that a JSON schema forces into shape. Greedy replies are letters and spaces, differ from
prompt to prompt, and close their strings and numbers soon.
"""

from __future__ import annotations

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


# added to the logits, whose own spread is about 2
LOGIT_BIAS = {"abcdefghijklmnopqrstuvwxyz": 6.0, " ": 9.0, '"': 8.0, ",}]": 4.0}


def byte_tokenizer(context_tokens: int) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte plus three specials, so any text is encoded without loss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(vocab_size: int, context_tokens: int) -> LlamaConfig:
    """Two layers of width 128 with 4 heads of 32, which vLLM's CPU attention takes."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
        max_position_embeddings=context_tokens,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def tiny_llama(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Random weights, wide enough (`initializer_range`) that greedy replies do not run in circles.

    Coordinate 0 of the residual stream is the same for every token and no layer writes to it, so column 0
    of the output matrix acts as a bias of the logits: `LOGIT_BIAS` makes replies look like words.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
    torch.nn.Module.to(model, torch.bfloat16)
    return model


def bias_logits(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes `LOGIT_BIAS` into column 0 of the output matrix, scaled by what reaches it on a sample."""
    sample = torch.tensor([tokenizer.encode("the quick brown fox " * 8)])
    with torch.no_grad():
        reached = model.model(sample).last_hidden_state[0, :, 0].mean()
        for characters, bias in LOGIT_BIAS.items():
            ids = [token for character in characters for token in tokenizer.encode(character)]
            model.lm_head.weight[ids, 0] = bias / reached


def make_tiny_model(out: Path, *, context_tokens: int = 4096, seed: int = 0) -> Path:
    """Writes the model into the folder `out`, made if absent, and returns it."""
    tokenizer = byte_tokenizer(context_tokens)
    model = tiny_llama(tiny_config(len(tokenizer), context_tokens), seed)
    bias_logits(model, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    return out
