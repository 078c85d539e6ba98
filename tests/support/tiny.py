"""Tokenizers and GGUF files for tests; the tiny model itself is in `art_nb.models.tiny`."""

import re
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from art_nb.models.gguf import CHATML_TURNS
from art_nb.models.tiny import SPECIAL_TOKENS, byte_bpe, tiny_model, tiny_tokenizer


def spelling_tokenizer(special, end, template):
    """A byte-level tokenizer with special tokens, an end and a template of its own."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_bpe(special), eos_token=end, chat_template=template)


def one_by_one(tokenizer, text):
    """A spelling no tokenizer would choose: each character alone, special tokens excepted."""
    marks = "|".join(map(re.escape, tokenizer.get_added_vocab()))
    pieces = re.findall(f"{marks}|.", text, re.DOTALL)
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def save_tiny_gguf(path: Path, name="Tiny 0b test"):
    """Write the same model as a GGUF file (the tensors by llama.cpp's names, its rotary order)."""
    from gguf import GGUFWriter

    tokenizer, out = tiny_tokenizer(), GGUFWriter(path, "llama")
    model = tiny_model(len(tokenizer))
    header(out, model.config, name)
    vocabulary(out, tokenizer)
    for key, value in model.state_dict().items():
        if key != "lm_head.weight":
            out.add_tensor(gguf_name(key), rotary(key, value.numpy(), model.config))
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return path


def header(out, config, name):
    """The facts of the architecture."""
    out.add_name(name)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)


def vocabulary(out, tokenizer):
    """The tokens, their types and the merges."""
    import json

    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    out.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    out.add_bos_token_id(1)
    out.add_eos_token_id(0)  # as many files have it: the end of a turn is not named here
    out.add_pad_token_id(0)
    out.add_add_bos_token(False)
    out.add_chat_template(CHATML_TURNS)


def gguf_name(key):
    """llama.cpp's name of a transformers tensor."""
    pairs = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for ours, theirs in pairs.items():
        key = key.replace(ours, theirs)
    return key


def rotary(key, value, config):
    """llama.cpp keeps the two halves of a rotary pair side by side in q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in key), None)
    if count is None:
        return value
    rows, columns = value.shape
    return value.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()
