"""What a new user may get wrong, in all commands: an answer of a sentence, before a model loads.

Each line is one command line, and behind the arrow the words that its answer must have. The files
that it names are in `folder`. WEB is a server that is none of vLLM's, PLAIN one without trees, and
SSH speaks no HTTP.
"""

from __future__ import annotations

import http.server
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import ran

from dyntree_plugin import pair

TARGET, DRAFT = map(str, pair.target_and_draft())
MOST_LINES = 9
"""Lines of an answer: typer's box at 80 columns, around a sentence that lists what is allowed."""

LINES = """
demo --prompts 4 → No such option: --prompts (Possible options: --num-prompts)
demo --num-prompts 100000 → --num-prompts: count=100000 must be
demo --seed 99999999999999999999 → '--seed': is too large: the largest is 4294967295
demo --method mtp → --method mtp needs --target
demo --dyntree { → --dyntree '{' is not JSON
demo --dyntree '{"node_budget": 32}' → dyntree.node_budget=32 exceeds num_speculative_tokens=16
demo --dyntree '{"width": 2, "width": 3}' → key 'width' is given twice, with 2 and 3
demo --dyntree '{"drafts": ["a/b/c"]}' → dyntree.drafts 'a/b/c' is no folder here
demo --target a → --target and --draft go together
demo --target a/b/c --draft a → --target 'a/b/c' is no folder here, and no name of a model
demo --target folder --draft folder → --target 'folder' is no model: has no config.json
show "" → the prompt is empty
show text --file empty.txt → a prompt is given twice
show --file nowhere.txt → --file 'nowhere.txt' cannot be read: No such file
show --from object.json → --from 'object.json' is not a trace of `dyntree show --trace`
show text --from object.json → --from draws a saved trace: leave out prompt
show --from trace.txt --nodes 8 --seed 1 → --from draws a saved trace: leave out --nodes, --seed
show --from trace.txt --output trace.txt → --output 'trace.txt' would overwrite the trace of --from
show text --output tree.png → --output 'tree.png': the suffix must be one of .html
show --step 1 --format html → --step is for --format terminal
show --target a --draft b → give a prompt for these models
show --method eagle text → the embedded target has no EAGLE head
show text --output folder → --output 'folder' is a folder: give a file
show text --trace nowhere/t.json → --trace 'nowhere/t.json': there is no folder 'nowhere'
top ftp://host → has the scheme 'ftp', which must be http or https
top localhost:1 → http://localhost:1/metrics cannot be read: Connection refused
top WEB → is not a page of metrics
top PLAIN → this server decodes without dyntree
top SSH → cannot be read
doctor -- dyntree serve model → leave out 'dyntree serve': dyntree doctor -- model
tune --target a --prompts ok.jsonl --output out → --draft is missing: give the draft to begin with
tune --target list --head eagle3 --prompts ok.jsonl --output out → its config.json must be a JSON
tune --target typed --head eagle3 --prompts ok.jsonl --output out → 'hidden_size' expected int
tune MODELS --prompts nowhere.jsonl --output out → --prompts 'nowhere.jsonl' must be a JSONL file
tune MODELS --prompts empty.jsonl --output out → --prompts 'empty.jsonl' has 0 prompts
tune MODELS --prompts half.jsonl --output out → line 1 has half of a surrogate pair
tune MODELS --prompts other.jsonl --output out → must have its prompt as text in one of prompt
tune MODELS --prompts blank.jsonl --output out → prompt 1 has 0 tokens
tune MODELS --prompts longer.jsonl --output out → prompt 81 has
tune MODELS --prompts ok.jsonl --output out --head eagle3 --adapter 4 → goes without --adapter
tune MODELS --prompts ok.jsonl --output out --draft-layers 1 → --draft-layers goes without --draft
tune MODELS --prompts ok.jsonl --output out --chat → must have a chat template
tune MODELS --prompts twice.jsonl --output out → key 'prompt' is given twice, with 'a' and 'b'
tune MODELS --prompts sampled.jsonl --output out → prompt 1 has sampling, which is for dyntree bench
tune MODELS --prompts ok.jsonl --output out --rows 17 → --rows 17 must be at most 16, the number
tune MODELS --prompts ok.jsonl --output empty.txt → 'empty.txt' is a file: give a folder
tune MODELS --prompts ok.jsonl --output out --max-tokens 3000 → leave no room for a prompt
tune MODELS --prompts ok.jsonl --output out --engine-arguments [1] → must be a JSON object
bench serve --prompts nowhere.jsonl → --prompts 'nowhere.jsonl' must be 'code', 'prose'
bench serve --prompts empty.jsonl → --prompts 'empty.jsonl' has no lines
bench serve --prompts long.jsonl --batch 1 → no prompt of 'long' has 1 to 1967 tokens, which
bench serve --max-tokens 5000 → no prompt of 'held-out code' has 1 to -2969 tokens, which the
bench serve --output /proc/r.json → --output '/proc/r.json' cannot be written
bench serve --prompts text.jsonl → --prompts 'text.jsonl', line 1 is not JSON
bench serve --prompts twice.jsonl → key 'prompt' is given twice, with 'a' and 'b'
bench serve --prompts number.jsonl → --prompts 'number.jsonl', line 1 must be a JSON object
bench serve --prompts "vllm:'" → cannot be split into flags: No closing quotation
bench serve --num-prompts 100000 → --num-prompts, or the largest --batch: count=100000
bench serve --dyntree '{"node_budget": 16, "max_depth": 32}' → max_depth=32 cannot be reached
bench serve --dyntree {} --dyntree {} → two have the name 'dynamic tree of 16'
bench serve --target folder --draft folder → --target 'folder' is no model
bench serve --target list --draft list → model 'list' cannot be read: its config.json must be
bench serve --target typed --draft list → the configuration of 'typed' cannot be read
bench serve --output nowhere/r.json → --output 'nowhere/r.json': there is no folder 'nowhere'
bench serve --chain tree:4 → with a kind of greedy, probabilistic, block, n-gram
bench serve --chain block:0 → --chain 'block:0' must be a length
bench serve --temperature 0 --chain block:4 → --chain block:4: at temperature 0 these drafts
bench serve --temperature 0 --chain probabilistic:4 → at temperature 0 these drafts
bench serve --method eagle → the embedded target has no EAGLE head
bench serve --method mtp → the embedded target has no MTP head
bench serve --method mtp --draft D → --target and --draft go together
bench serve --method eagle3 --target T → --target and --draft go together
bench serve --target T --chain n-gram:5 → --method ngram needs no draft, and measures
bench serve --method ngram --dyntree '{"growth": "chain"}' → dyntree.growth=chain needs a draft
bench serve --chain -1 → --chain '-1' must be a length, such as 5, or KIND:LENGTH
bench serve --chain 0 --chain 4 → --chain 0 leaves all chains out: give it alone
bench serve --chain all --chain 4 → --chain all measures all chains: give it alone
bench serve --method ngram --draft folder → --draft must not be given: --method ngram measures
bench serve --chat → --chat: the target's tokenizer must have a chat template, and has none
"""
CASES = [line.split(" → ") for line in LINES.strip().splitlines()]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        plain = self.path.startswith("/plain")
        self.wfile.write(b"# TYPE a counter\na_total 1\n" if plain else b"<html>hello</html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Run servers that are none of ours."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    ssh = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                with ssh.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(b"SSH-2.0-Server\r\n")
            except OSError:
                return

    threading.Thread(target=greet, daemon=True).start()
    at = f"127.0.0.1:{web.server_port}"
    yield {"WEB": at, "PLAIN": f"{at}/plain", "SSH": f"127.0.0.1:{ssh.getsockname()[1]}"}
    ssh.close()
    web.shutdown()


PROMPTS = b"".join(b'{"prompt": "def f%d(x):"}\n' % number for number in range(80))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with files that a user may give by mistake."""
    contents = {
        "ok.jsonl": PROMPTS,
        "empty.jsonl": b"",
        "empty.txt": b"",
        "long.jsonl": b'{"prompt": "%s"}\n' % (b"x = 1" * 2000),
        "text.jsonl": b"just text\n",
        "number.jsonl": b"5\n",
        "other.jsonl": b'{"other": 1}\n' * 80,
        "blank.jsonl": b'{"prompt": ""}\n' + PROMPTS,
        "longer.jsonl": PROMPTS + b'{"prompt": "%s"}\n' % (b"x = 1" * 2000),
        "sampled.jsonl": b'{"prompt": "a", "sampling": {"top_k": 2}}\n' * 80,
        "twice.jsonl": b'{"prompt": "a", "prompt": "b"}\n',
        "half.jsonl": b'{"prompt": "\\ud800"}\n' * 80,
        "object.json": b"{}",
        "trace.txt": b"{}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for model, config in {
        "list": "[]",
        "typed": '{"model_type": "llama", "hidden_size": "a"}',
    }.items():
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def words_of(line: str, addresses: dict[str, str]) -> list[str]:
    known = addresses | {"MODELS": f"--target {TARGET} --draft {DRAFT}"}
    return shlex.split(re.sub(r"\b[A-Z]{3,}\b", lambda found: known.get(found[0], found[0]), line))


@pytest.mark.parametrize(("line", "answer"), CASES, ids=[line for line, _ in CASES])
def test_a_wrong_input_is_answered_in_a_sentence(
    line: str, answer: str, folder: Path, addresses: dict[str, str]
) -> None:
    before = sorted(folder.iterdir())
    done = ran(*words_of(line, addresses))
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    # typer breaks lines within a box.
    told = re.sub(r"[\s│]+", " ", done.stderr)
    for part in re.split(r"(?<=:) ", answer):
        assert part in told
    assert "Traceback" not in done.output
    assert len(done.stderr.strip().splitlines()) <= MOST_LINES
    assert sorted(folder.iterdir()) == before


def test_where_no_file_can_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for line in ("show x --output a.html", "bench serve --output r.json"):
        assert "cannot be written: permission denied" in ran(*line.split()).stderr
