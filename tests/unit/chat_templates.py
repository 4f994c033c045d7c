"""Chat templates that behave like those of known models, in words of their own, and tokenizers."""

from transformers import PreTrainedTokenizerFast

from pixelrag.models.tiny_tokenizer import byte_tokenizer

# ChatML, as SmolLM2's: a system turn of its own if there is none.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's way: reasoning is shown behind the last question only, the last answer always has a block
# for it, calls and results of tools.
THINKING = """\
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{% for t in tools %}{{- t | tojson }}{% endfor %}
{{- '</tools><|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set ns.why, ns.text = '', m.content %}
    {%- if m.reasoning_content is string %}{% set ns.why = m.reasoning_content %}
    {%- elif '</think>' in m.content %}
      {%- set ns.why = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set ns.text = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or ns.why) %}
      {{- '<think>\n' + ns.why.strip('\n') + '\n</think>\n\n' + ns.text.lstrip('\n') }}
    {%- else %}{{- ns.text }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
  {%- endif %}
{%- endif %}"""
# Llama 3's way: white space around messages is stripped.
HEADERS = (
    "{% for m in messages %}{{ bos_token if loop.first else '' }}"
    "{{ '<|start|>' + m.role + '<|message|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>\n\n' }}{% endif %}"
)
# Mistral's way: no header, a space before the answer; roles alternate but for calls.
BRACKETS = """\
{%- set plain = messages | rejectattr('tool_calls') | rejectattr('role', 'eq', 'tool') | list %}
{%- for m in plain %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate') }}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content + '[/RESULT]' }}
  {%- elif m.tool_calls %}{{- '[CALLS]' + m.tool_calls | tojson + eos_token }}
  {%- else %}{{- ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
# DeepSeek R1's way: the prompt opens a block that turns do not show; reasoning is dropped.
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ '<|message|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|><think>\n' }}{% endif %}"
)
# gpt-oss's way: the model itself writes which channel it speaks on; the last turn ends otherwise.
CHANNELS = """\
{%- for m in messages %}
  {%- if m.role != 'assistant' %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}
  {%- elif m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start|>assistant to=' + call.name }}
    {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
  {%- else %}
    {%- if m.thinking and loop.last %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|eot|>' }}
    {%- endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last else '<|eot|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
# A template that says itself what the assistant's words are.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only the last answer is marked.
MARKED_LAST = MARKED.replace(
    "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
)
# An answer is shown twice: no telling which is the assistant's.
TWICE = CHATML.replace("m.content", "m.content + m.content")
SILENT = CHATML.replace("m.content", "(m.content if m.role == 'user' else '')")

SPECIALS = ("<|start|>", "<|message|>", "<|channel|>", "<|eot|>", "<|call|>", "<|return|>")


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with the templates' control tokens."""
    tokenizer = byte_tokenizer()
    specials = sorted({*tokenizer.all_special_tokens, *SPECIALS})
    tokenizer.add_special_tokens({"extra_special_tokens": specials, "bos_token": "<|bos|>"})
    tokenizer.chat_template = template
    return tokenizer
