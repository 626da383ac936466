"""Long histories of a Python function with several processes: the owner answers chats, whichever has the connection."""

from pathlib import Path

from support.several_processes import processes

FUNCTION = """
def reply(chats):
    return [f"{len(chat)} messages" for chat in chats]
"""


def test_chats_of_every_process_use_the_same_summary(tmp_path: Path) -> None:
    (tmp_path / "chat_function.py").write_text(
        "def reply(chats):\n    return [f'{len(chat)} messages' for chat in chats]"
    )
    worker = {"name": "own", "kind": "python", "function": "chat_function:reply", "model": "m", "task": "generate"}
    config = {
        "workers": [{**worker, "directory": str(tmp_path)}],
        "histories": {"*": {"threshold": 0.5, "keep_messages": 2, "context_tokens": 500}},
    }
    messages = [{"role": "user", "content": f"{number} {'word ' * 200}"} for number in range(10)]
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    with processes(tmp_path, config) as (gateway, _):
        answers = [gateway.call("POST", "/v1/chat/completions", body, {}) for _ in range(12)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.json["choices"][0]["message"]["content"] for answer in answers} == {"3 messages"}
        assert len({answer.process for answer in answers}) == 1, "the owner has the summaries"
        (id,) = {answer.headers["x-inferry-history"] for answer in answers}
        assert gateway.call("GET", f"/v1/histories/{id}", None, {}).status == 200
