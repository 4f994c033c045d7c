"""Rows in the form of ms-swift's embedding training, turned into those of `schema`.

    {"messages": [{"role": "system", ...}, {"role": "user", "content": "<the query>"}],
     "positive_messages": [[{"role": "user", "content": "<image>"}]],
     "positive_images": [["a.png"]],
     "negative_messages": [[...], ...],
     "negative_images": [["b.png"], ...]}

Several positives are several positives. System messages are not taken: the instructions are those
of `model.query_instruction` and `model.document_instruction`, whose defaults are the ones that
PixelRAG's converter writes. A document is a text or one image, not both.
"""

from typing import Any

IMAGE = "<image>"


def is_swift_row(obj: dict[str, Any]) -> bool:
    """Whether a row has this form."""
    return "messages" in obj or "positive_messages" in obj


def plain_row(obj: dict[str, Any], reasons: list[str]) -> dict[str, Any]:
    """The same row with the keys of `schema`; what cannot be said with them goes to `reasons`."""
    if obj.get("images"):
        reasons.append("images belongs to the query, and queries are text")
    row: dict[str, Any] = {"query": _user_content(obj.get("messages"), "messages", reasons)}
    positives = _documents(obj, "positive", reasons)
    if not positives:
        reasons.append("positive_messages names no document")
    for number, (kind, value) in enumerate(positives):
        plain = "chunk_path" if kind == "image" else "passage"
        if number == 0:
            row[plain] = value
        else:
            row.setdefault(f"pos_{plain}s", []).append(value)
    for kind, value in _documents(obj, "negative", reasons):
        plain = "neg_chunk_paths" if kind == "image" else "neg_passages"
        row.setdefault(plain, []).append(value)
    return row


def _documents(obj: dict[str, Any], side: str, reasons: list[str]) -> list[tuple[str, Any]]:
    """("text" or "image", value) of every document of a side."""
    messages, images = obj.get(f"{side}_messages") or [], obj.get(f"{side}_images") or []
    if not isinstance(messages, list) or not isinstance(images, list):
        reasons.append(f"{side}_messages and {side}_images are lists of lists")
        return []
    if images and len(images) != len(messages):
        reasons.append(f"has {len(messages)} {side}_messages and {len(images)} {side}_images")
        return []
    found: list[tuple[str, Any]] = []
    for number, one in enumerate(messages):
        name = f"{side}_messages[{number}]"
        content = _user_content(one, name, reasons)
        paths = images[number] if images else []
        paths = paths if isinstance(paths, list) else [paths]
        if content is None:
            continue
        if IMAGE not in content and not paths:
            found.append(("text", content))
        elif content.strip() == IMAGE and len(paths) == 1:
            path = paths[0].get("path") if isinstance(paths[0], dict) else paths[0]
            found.append(("image", path))
        else:
            reasons.append(
                f"{name} has {content.count(IMAGE)} times {IMAGE} in {len(content)} "
                f"characters and {len(paths)} images; expected a text, or {IMAGE} alone "
                "and one image"
            )
    return found


def _user_content(messages: Any, name: str, reasons: list[str]) -> str | None:
    """The text of the only message that a user wrote."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        reasons.append(f"{name} is a list of messages, each with role and content")
        return None
    written = [m for m in messages if m.get("role") != "system"]
    if [m.get("role") for m in written] != ["user"] or not isinstance(
        written[0].get("content"), str
    ):
        reasons.append(f"{name} has one message of the user, a text, beside that of the system")
        return None
    return written[0]["content"]
