"""A small random Qwen2 in Hugging Face format, with a tokenizer that it can answer in: whole answers are tokens.

A random model never gives a right answer letter by letter, and without one no reward differs from another and nothing
is learned. So each answer that a task accepts is one token, and one channel of the embeddings, the same for all tokens
but for answers and the end, makes these likely: it acts as a bias of the head, whether that is tied or not.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END = "<|im_end|>"
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\n' ~ message['content'] ~ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 512
LIKELY = 2.2
"""In the channel that acts as a bias of the head, where other tokens have 1: about one token in eight is the end."""


def make_tokenizer(texts: Sequence[str], answers: Sequence[str], end: str) -> PreTrainedTokenizerFast:
    """Byte pairs learned from `texts`, so that prompts are as short as a real tokenizer's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=end, chat_template=CHAT_TEMPLATE
    )
    made.add_tokens(list(answers))
    return made


def save_qwen(folder: Path, tied: bool, texts: Sequence[str], answers: Sequence[str], end: str = END) -> None:
    """Write the model, in bfloat16 as the real ones are, and its tokenizer.

    Args:
        tied: the head is the input embedding.
        texts: what the prompts are made of.
        answers: texts that become tokens, and that the model says often.
        end: the token that ends a completion; base models have another one than chat models.
    """
    tokenizer = make_tokenizer(texts, answers, end)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,  # of 32: the smallest that vLLM's CPU build has
            num_key_value_heads=1,
            max_position_embeddings=32768,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    likely = tokenizer.convert_tokens_to_ids([end, *answers])
    with torch.no_grad():
        for embedding in {model.get_input_embeddings(), model.get_output_embeddings()}:
            embedding.weight[:, 0] = 1.0
            embedding.weight[likely] = 0.0
            embedding.weight[likely, 0] = LIKELY
        model.model.norm.weight[0] = 20.0
        for layer in model.model.layers:  # nothing else writes into that channel
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
