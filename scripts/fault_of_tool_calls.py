"""Report of a fault of vLLM 0.32.0: a streamed tool call that `max_tokens` cuts before its
arguments shows arguments `{}`, which the model has not written.

Prints, by the tokens of a delta, for how many of the answer's lengths that is so.
"""

from types import SimpleNamespace

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

ANSWER = ["<tool_call>", "\n", '{"', "name", '":', ' "', "look", "_up", '",', ' "', "arguments",
          '":', ' {"', "key", '":', " 1", "}}", "\n", "</tool_call>"]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def streamed(tokens: list[str], width: int) -> str:
    """Return the arguments that a client of the server has got at the end."""
    tokenizer = SimpleNamespace(get_vocab=dict)
    made = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=[TOOL])
    parser, arguments = made(tokenizer, request.tools), ""
    for first in range(0, len(tokens), width):
        delta = tokens[first : first + width]
        last = first + width >= len(tokens)
        ids = list(range(first, first + len(delta)))
        found = parser.parse_delta("".join(delta), ids, request, [], finished=last)
        for call in found.tool_calls if found else ():
            arguments += call.function.arguments or "" if call.function else ""
    return arguments


for width in (1, 2, 4, 7):
    cut = [streamed(ANSWER[:length], width) for length in range(1, len(ANSWER) + 1)]
    print(f"deltas of {width}: {cut.count('{}')} of {len(cut)} lengths show {{}}")
