"""The Python package `openai` against a Pagoda server on the tiny model: argument 1 is the base URL."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
checks = 0


def check(condition, what):
    global checks
    if not condition:
        sys.exit(f"failed: {what}")
    checks += 1


messages = [{"role": "user", "content": "Hello"}]
check([model.id for model in client.models.list()] == ["tiny"], "models")

whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
check(whole.choices[0].finish_reason in ("length", "stop") and whole.usage.completion_tokens <= 8, "chat")

chunks = list(
    client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
check(text == whole.choices[0].message.content, "streamed chat is the whole one")
check(chunks[-1].usage.total_tokens == whole.usage.total_tokens, "streamed usage")
check(chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "cached prompt")

completion = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
streamed = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0, stream=True)
check("".join(chunk.choices[0].text for chunk in streamed) == completion.choices[0].text, "streamed completion")

several = client.chat.completions.create(
    model="tiny", messages=messages, max_tokens=5, n=3, seed=4, logprobs=True, top_logprobs=2, frequency_penalty=0.5
)
check([choice.index for choice in several.choices] == [0, 1, 2], "three answers")
entry = several.choices[2].logprobs.content[0]
check(len(entry.top_logprobs) == 2 and entry.logprob <= 0 and bytes(entry.bytes), "log probabilities")
best = client.completions.create(model="tiny", prompt="abc", max_tokens=5, best_of=3, logprobs=1, echo=True)
check(best.choices[0].logprobs.token_logprobs[0] is None and best.choices[0].text.startswith("abc"), "echo")

for call, kind, what in [
    (lambda: client.chat.completions.create(model="nope", messages=messages), openai.NotFoundError, "unknown model"),
    (lambda: client.chat.completions.create(model="tiny", messages=[]), openai.BadRequestError, "no messages"),
    (lambda: client.chat.completions.create(model="tiny", messages=messages, temperature=-1), openai.BadRequestError, "temperature"),
    (lambda: client.completions.create(model="tiny", prompt="a" * 700), openai.BadRequestError, "too long"),
]:
    try:
        call()
        sys.exit(f"failed: {what} was accepted")
    except kind as error:
        check(bool(error.body["message"]), what)

print(f"{checks} checks passed")
