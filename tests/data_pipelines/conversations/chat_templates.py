"""Chat templates of several kinds, put on the tiny target's tokenizer."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase

# The end of turn directly after the content, a beginning of text, no newline after the turn.
HEADERS = (
    "<|begin|>{% for m in messages %}<|head|>{{ m['role'] }}<|tail|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}"
)
# No special token at all.
PLAIN = (
    "{% for m in messages %}{{ 'User: ' if m['role'] == 'user' else 'Bot:' }}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)
# The conversation, not the turn, ends with another special token.
CLOSED = (
    "{% for m in messages %}<|head|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% else %}<|begin|>{% endif %}"
)
# An empty block of reasoning in the last turn only: history is rewritten.
REASONING = (
    "{% for m in messages %}<|head|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
# Refuses what it does not like.
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|head|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]})
    other.chat_template = template
    return other
