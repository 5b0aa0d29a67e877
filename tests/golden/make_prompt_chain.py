"""Prints the golden values of protocol/src/prompt_chain/tests.rs. Needs the package `xxhash`."""

import struct

import xxhash


def h(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def part(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def root(kind: int, tools: str = "") -> int:
    return h(b"pagoda-chain-1" + bytes([kind]) + part("m") + part("") + part("") + part(tools) + part(""))


def extended(parent: int, data: bytes) -> int:
    return h(struct.pack("<Q", parent) + data)


def message(parent: int, opening: bytes, data: bytes):
    parent = extended(parent, opening)
    chunks = []
    for start in range(0, max(len(data), 1), 256):
        parent = extended(parent, data[start : start + 256])
        chunks.append(parent)
    return parent, chunks


def show(values):
    print("[" + ", ".join(f"0x{value:016x}" for value in values) + "]")


parent, all_chunks = root(0), []
for role, content in [("system", "You help."), ("user", "x" * 300), ("assistant", "")]:
    parent, chunks = message(parent, part(role), content.encode())
    all_chunks += chunks
show(all_chunks)
show(message(root(2), b"", struct.pack("<65I", *range(65)))[1])
opening = part("assistant") + part("calls") + part("[1.5,null]") + part("name") + part('"n"')
show(message(root(0, '[{"a":"ü","b":1}]'), opening, b"")[1])
