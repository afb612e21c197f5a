"""Chat templates: the Jinja programs that come with a model and turn messages into its prompt text.

They are set up exactly as transformers sets them up (version 5; `utils/chat_template_utils.py`): a sandbox in which
nothing can be changed, trimmed blocks, loop controls, a `tojson` that escapes nothing, `raise_exception`,
`strftime_now`, a `generation` tag that only marks, a guarded `namespace`. What transformers renders is rendered alike,
character for character, with two additions where it would fail or print Python: text parts are joined for a template
that knows only strings, and a missing content counts as empty.

Text inside a message is data to the template, but the tokenizer that reads the result cannot tell it from the
template's own: a message that spells a special token is encoded as that token, as it is in transformers by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from enginewright.recipes.errors import RequestError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]  # {"role": ..., "content": ..., further keys that the template knows}

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant said; for a prompt it is the text inside."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @staticmethod
    def _inside(caller: Any) -> str:
        return caller()


class _Dict:
    """Stands for `dict` in a template: it makes dictionaries, and shows nothing of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, closed to names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace cannot hold {name!r}: it begins with an underscore"
            )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class ChatTemplate:
    """A model's template, or several under names.

    `special_tokens` (bos_token, eos_token, …) are variables in every template. Raises RequestError for
    everything that a conversation or a template can do wrong; the template's own message is in it.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._single = isinstance(source, str)
        self._special_tokens = dict(special_tokens or {})
        self._environment = _environment()
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        `template` names one of several, or is itself a template. `continue_final_message` leaves the last message open,
        for the model to go on with. `variables` are handed to the template (they hide special tokens of that name).
        """
        compiled = self._compile(self._choose(template, tools))
        chat = _check_messages(messages, parts=compiled.takes_parts)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message and add_generation_prompt exclude each other")
            final = _tag_final(chat)
        context = {
            **self._special_tokens,
            **_plain(dict(variables or {})),
            "messages": chat,
            "tools": _plain(_dictionaries("tools", tools)),
            "documents": _plain(_dictionaries("documents", documents)),
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(context)
        return _cut_at_tag(text, final) if continue_final_message else text

    def _choose(self, template: str | None, tools: Any) -> str:
        if template is not None:
            return template if self._single else self.sources.get(template, template)
        if not self._single and tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        raise RequestError(
            "the model has several chat templates and none is called default",
            expected=f"one of {', '.join(sorted(self.sources))}",
            action="name one of them",
        )

    def _compile(self, source: str) -> _Compiled:
        if source not in self._compiled:
            try:
                self._compiled[source] = _Compiled(self._environment, source)
            except jinja2.TemplateError as error:
                raise RequestError("the chat template cannot be read", found=str(error)) from error
        return self._compiled[source]


class _Compiled:
    """One template and whether it walks over the parts of a message's content."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        tree = environment.parse(source)
        self.takes_parts = _walks_over_content(tree)
        self._template = environment.from_string(source)

    def render(self, context: dict[str, Any]) -> str:
        try:
            return self._template.render(context)
        except jinja2.UndefinedError as error:
            chat = context["messages"]
            if all("content" in message for message in chat):
                raise _refused(error) from error
            filled = [{**message, "content": message.get("content", "")} for message in chat]
            try:
                return self._template.render({**context, "messages": filled})
            except Exception as second:
                raise _refused(second) from second
        except Exception as error:  # a template can raise anything: it is a program
            raise _refused(error) from error


def _refused(error: Exception) -> RequestError:
    return RequestError(f"the chat template refused the conversation: {error}")


def _walks_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether some loop runs over a message's `content`, directly or under another name."""

    def reads_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
        nodes = [node, *node.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Name))]
        for inner in nodes:
            if isinstance(inner, jinja2.nodes.Getattr) and inner.attr == "content":
                return True
            if (
                isinstance(inner, jinja2.nodes.Getitem)
                and isinstance(inner.arg, jinja2.nodes.Const)
                and inner.arg.value == "content"
            ):
                return True
            if isinstance(inner, jinja2.nodes.Name) and inner.name in names:
                return True
        return False

    names = {
        node.target.name
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name) and reads_content(node.node, set())
    }
    macro_arguments = {
        argument.name for macro in tree.find_all(jinja2.nodes.Macro) for argument in macro.args
    }
    names |= {name for name in macro_arguments if "content" in name}
    names -= {"messages", "message"}
    return any(reads_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


# ------------------------------------------------------------------------------------------- conversations


def _check_messages(messages: Any, parts: bool) -> list[dict[str, Any]]:
    """Return plain copies of the messages: no None values, and contents that the template can take."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {role, content}", found=type(messages).__name__)
    if not messages:
        raise RequestError("the conversation is empty", expected="at least one message")
    chat = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{place}] must be an object", found=type(message).__name__)
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{place}] needs a role", found=repr(message.get("role")), expected="a string"
            )
        plain = {key: _plain(value) for key, value in message.items() if value is not None}
        if "content" in plain:
            plain["content"] = _check_content(place, plain["content"], parts)
        chat.append(_alias_reasoning(plain))
    return chat


def _check_content(place: int, content: Any, parts: bool) -> str | list[Any]:
    where = f"messages[{place}].content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} cannot be used", found=type(content).__name__, expected="a string or a list of parts"
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{where}[{number}] is not text",
                found=repr(kind if kind != "text" else text)[:80],
                expected="text parts only",
            )
        texts.append(text)
    return content if parts else "".join(texts)


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Offer a message's reasoning under each name that templates know it by."""
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _dictionaries(name: str, values: Sequence[Any] | None) -> list[Any] | None:
    if values is None:
        return None
    for place, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{place}] must be an object", found=type(value).__name__)
    return list(values)


def _plain(value: Any) -> Any:
    """Rebuild `value` out of JSON's types: a template never holds an object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # a subclass may print itself as something else
    if isinstance(value, (int, float)):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _tag_final(chat: list[dict[str, Any]]) -> str:
    """Append a marker to the last message's text and return that text."""
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        part = next((part for part in reversed(content) if "text" in part), None)
        if part is not None:
            final = part["text"]
            part["text"] += _TAG
            return final
    if not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message with text")
    chat[-1]["content"] = content + _TAG
    return content


def _cut_at_tag(text: str, final: str) -> str:
    tag = _TAG.strip()
    if final.strip() not in text or tag not in text:
        raise RequestError("the chat template drops the final message, so it cannot be continued")
    place = text.rindex(tag)
    kept = text[:place]
    return kept if text[place : place + len(_TAG)] == _TAG else kept.rstrip()
