"""A small random Qwen2 in Hugging Face format that can sample right answers.

A random model never spells out a right answer, and without one all rewards are equal and nothing is learned.
So each answer that a task accepts is one token. One channel of the embeddings has the same value for all
tokens but answers and the end token. It acts as a bias of the head that makes these tokens likely, whether
the head is tied or not.
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
ANSWER_BIAS = 2.2
"""Value of answers and end token in the bias channel, where other tokens have 1: one sampled token in eight is
an end.
"""


def make_tokenizer(texts: Sequence[str], answers: Sequence[str], end: str) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of byte pairs from `texts`.

    Its prompts are as short as those of a real tokenizer.
    """
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
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=end, chat_template=CHAT_TEMPLATE
    )
    fast_tokenizer.add_tokens(list(answers))
    return fast_tokenizer


def save_qwen(folder: Path, tied: bool, texts: Sequence[str], answers: Sequence[str], end: str = END) -> None:
    """Writes the model, in bfloat16 as the real ones are, and its tokenizer.

    Args:
        tied: the head is the input embedding.
        texts: texts of the prompts.
        answers: texts that become tokens, and that the model samples often.
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
            num_attention_heads=2,  # head size 32, the smallest of vLLM's CPU build
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
            embedding.weight[likely, 0] = ANSWER_BIAS
        model.model.norm.weight[0] = 20.0
        for layer in model.model.layers:  # no layer writes into that channel
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
