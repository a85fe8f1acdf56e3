"""Chat templates with the structure of well-known families' own, in our wording (see `chat_templates`)."""

from __future__ import annotations

# The default system turn, roles as they come, a new line after the turn.
CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The day in the system turn, which takes the tools; trimmed content; calls as JSON; results under another role.
LLAMA3 = """{{ bos_token }}
{%- set head, first = '', messages %}
{%- if messages[0].role == 'system' %}{% set head = messages[0].content | trim %}{% set first = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n' }}
{%- if tools %}{{ 'Functions:\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{% endif %}
{{- head + '<|eot_id|>' }}
{%- for m in first %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Reasoning only after the last question, an empty block where the last turn has none; results of tools as a user's turn.
QWEN3 = """
{%- if tools %}
{{- '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- 'Functions:' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content, thought = m.content, m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n' if content or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# The prompt opens the think block.
QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    "{{- '<think>\n' }}",
)

# The system turn goes into the first question; strictly in turns; another name for the assistant.
GEMMA = """{{ bos_token }}
{%- set head, first = '', messages %}
{%- if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}{% set first = messages[1:] %}{% endif %}
{%- for m in first %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (head if loop.first else '') }}
{{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Channels; reasoning of earlier answers is gone; the last turn ends otherwise than earlier ones; calls in a third way.
HARMONY = """
{{- '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set head, first = '', messages %}
{%- if messages[0].role in ['system', 'developer'] %}
{%- set head = messages[0].content %}{% set first = messages[1:] %}
{%- endif %}
{%- if head or tools %}
{{- '<|start|>developer<|message|>' + head }}
{%- for t in tools or [] %}{{ '\ntype ' + t.function.name + ' = ' + t.function.parameters | tojson }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(call='') %}
{%- for m in first %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('a call has content or thinking, not both') }}{% endif %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set ns.call = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.call + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if not ns.call %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# The prompt opens a think block that no rendered answer has; what comes before its end is stripped from every answer.
DEEPSEEK_R1 = """{{ bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- set ns = namespace(after_tool=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] %}
{{- ('' if ns.after_tool else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}{% set ns.after_tool = false %}
{%- elif m.role == 'tool' %}{% set ns.after_tool = true %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

# No think block in the prompt; calls only where the content is null, with their arguments as text.
DEEPSEEK_V3 = DEEPSEEK_R1.replace("<｜Assistant｜><think>\n", "<｜Assistant｜>")

# Tools and the system turn stand before the last question, wherever that is; identities of calls are checked.
MISTRAL = """{{ bos_token }}
{%- set head, first = '', messages %}
{%- if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set first = messages[1:] %}{% endif %}
{%- set ns = namespace(asked=-1, user=true) %}
{%- for m in first %}
{%- if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != ns.user %}{{ raise_exception('user and assistant must alternate') }}{% endif %}
{%- set ns.user = not ns.user %}
{%- endif %}
{%- endfor %}
{%- for m in first %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.asked %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (head + '\n\n' if head and loop.index0 == ns.asked else '') + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('the identity of a call has nine characters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant, tool and a first system') }}
{%- endif %}
{%- endfor %}"""

# A second special token ends the conversation, not the turn; special tokens swallow the new line after them.
PHI = """
{%- for m in messages %}
{%- if m.role in ['system', 'user', 'assistant'] %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Role and name in one header; calls in a section of their own, inside the turn.
KIMI = """
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- if messages[0].role != 'system' %}{{ '<|im_system|>system<|im_middle|>Be helpful.<|im_end|>' }}{% endif %}
{%- for m in messages %}
{%- set tag = m.role if m.role in ['user', 'assistant'] else 'system' %}
{{- '<|im_' + tag + '|>' + (m.name or m.role) + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{ '## Result of ' + m.tool_call_id + '\n' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + (c.id or '') + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

# Nothing ends a turn but the next one's header; calls as pairs of key and value.
GLM = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\nFunctions:' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\n<think>' + (m.reasoning_content if loop.index0 > ns.asked and m.reasoning_content else '') + '</think>' }}
{%- if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}
{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Two special tokens end a turn; another template where tools are given.
_COMMAND_R_TURN = """
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>[' }}
{%- for c in m.tool_calls %}
{{- '{"tool_name": "' + c.function.name + '", "parameters": ' + c.function.arguments | tojson + '}' }}
{{- ', ' if not loop.last }}
{%- endfor %}
{{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
{%- elif m.role in ['system', 'tool'] %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}
{%- elif m.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
COMMAND_R = {
    "default": "{{ bos_token }}" + _COMMAND_R_TURN,
    "tool_use": "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Functions:"
    "{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}<|END_OF_TURN_TOKEN|>" + _COMMAND_R_TURN,
}

# No special token opens a turn: the header ends with a new line that merges with one that begins the answer.
MERGING = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ 'Answer:\n' + m.content + eos_token + '\n' }}
{%- elif m.role == 'user' %}{{ 'User:\n' + m.content + '\n' }}
{%- else %}{{ m.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Answer:\n' }}{% endif %}"""

# The end of turn directly after the content, a beginning of text, no new line after the turn.
HEADERS = (
    "<|begin|>{% for m in messages %}<|head|>{{ m['role'] }}<|tail|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}"
)
# No special token at all.
PLAIN = (
    "{% for m in messages %}{{ 'User: ' if m['role'] == 'user' else 'Bot:' }}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)
# Refuses what it does not like.
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|head|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
