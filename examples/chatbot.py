"""A chat in the terminal that remembers: python examples/chatbot.py ann

Needs `pip install 'undertow[engine]'` and an OpenAI-compatible server in UNDERTOW_LLM_URL. The memories stay
in the folder `chatbot-memories`. An empty line ends the chat.
"""

import sys
from datetime import datetime

from openai import OpenAI

from undertow import Engine, Settings, make_encoder, make_llm

SYSTEM = "You are a friendly companion. What you remember of earlier talks:\n{memories}"


def main(tenant: str) -> None:
    settings = Settings()
    if settings.llm_url is None:
        sys.exit("Set UNDERTOW_LLM_URL to an OpenAI-compatible server, such as http://localhost:8000/v1.")
    assistant = OpenAI(base_url=settings.llm_url, api_key="none")
    model = settings.llm_model or assistant.models.list().data[0].id
    session = datetime.now().isoformat(timespec="seconds")
    with Engine("chatbot-memories", settings, make_encoder(settings), llm=make_llm(settings)) as engine:
        while question := input("you: ").strip():
            known = engine.search(tenant, question).ranked(8) if tenant in engine.tenants else []
            memories = "\n".join(f"- {hit.memory}" for hit in known) or "- nothing yet"
            said = [{"role": "user", "content": question}]
            prompt = [{"role": "system", "content": SYSTEM.format(memories=memories)}, *said]
            reply = assistant.chat.completions.create(model=model, messages=prompt).choices[0].message
            print(f"assistant: {reply.content}")
            said.append({"role": "assistant", "content": reply.content or ""})
            now = datetime.now().isoformat(timespec="seconds")
            engine.add(tenant, said, session_id=session, timestamp=now)
            engine.step(0)  # decides what it can now; the rest is decided at the next turns or the next start


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "me")
