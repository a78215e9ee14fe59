"""The exponents of `lossless` in plain torch, from docs/FORMAT.md: what its kernels must give."""

import struct

import torch

LANES, PAD = 64, 8


def packed(bits: torch.Tensor) -> bytes:
    """Return bits, a multiple of eight, as bytes; the first is the lowest of its byte."""
    weights = 2 ** torch.arange(8)
    return bytes((bits.view(-1, 8).long() * weights).sum(1).tolist())


def unpacked(data: bytes) -> torch.Tensor:
    """Return what `packed` was given."""
    whole = torch.tensor(list(data), dtype=torch.long)
    return ((whole[:, None] >> torch.arange(8)) & 1).flatten()


def filled(values: torch.Tensor, to: int) -> torch.Tensor:
    """Return a vector with zeros behind it, up to a multiple."""
    return torch.cat([values, values.new_zeros(-values.numel() % to)])


def bases_of(exponents: torch.Tensor, columns: int) -> tuple[bytes, torch.Tensor]:
    """Choose the bases of a piece; return their bytes, and one for each column."""
    rows = exponents.view(-1, columns)
    count = rows.shape[0]
    mean = rows.sum(0) // count
    total = rows.clamp(mean - 8, mean + 8).sum(0)
    wanted = ((8 * total + 15 * count) // (8 * count)).clamp(max=255)
    greatest = int(wanted.max())
    below = (greatest - wanted).clamp(max=15)
    pairs = filled(below, 2).view(-1, 2)
    return bytes([greatest, *(pairs[:, 0] + 16 * pairs[:, 1]).tolist()]), greatest - below


def coded(block: torch.Tensor, piece: int, columns: int) -> bytes:
    """Return a bfloat16 block's columns and all that follows them."""
    bits = block.contiguous().view(torch.int16).flatten().long() & 0xFFFF
    table, words, second, escapes, seconds = b"", b"", [], b"", 0
    for values in bits.split(piece):
        exponents = values >> 7 & 0xFF
        data, bases = bases_of(exponents, columns)
        below = (bases.repeat(len(values) // columns) - exponents) % 256
        code = torch.where(below < 8, below, torch.where(below >= 254, (below + 10) % 256, 10))
        code = filled(code, LANES).view(-1, LANES)
        first, more = code.clamp(max=3), code >= 3
        table += data
        words += packed(torch.stack([first & 1, first >> 1], 1))
        levels = torch.stack([(code - 3) >> bit & 1 for bit in range(3)], 1)
        second.append(levels[more[:, None].expand_as(levels)])
        seconds += int(more.sum())
        escapes += bytes(exponents[code.flatten()[: len(values)] == 10].tolist())
    signs = bytes((bits >> 8 & 0x80 | bits & 0x7F).tolist())
    level = packed(filled(torch.cat(second), 8))
    head = struct.pack("<II", columns, seconds)
    return head + table + words + signs + level + escapes + bytes(PAD)


def restored(data: bytes, count: int, piece: int) -> torch.Tensor:
    """Return the bits of as many values, as int16."""
    columns, seconds = struct.unpack_from("<II", data)
    sizes = [min(piece, count - start) for start in range(0, count, piece)]
    groups = sum(-(-size // LANES) for size in sizes)
    table = 8
    words = table + len(sizes) * (1 + (columns + 1) // 2)
    signs = words + 16 * groups
    level = signs + count
    escapes = level + -(-3 * seconds // 8)
    first = unpacked(data[words:signs]).view(-1, 2, LANES)
    code = first[:, 0] + 2 * first[:, 1]
    more, bits = code == 3, unpacked(data[level:escapes])
    levels = torch.zeros((groups, 3, LANES), dtype=torch.long)
    levels[more[:, None].expand_as(levels)] = bits[: 3 * seconds]
    code += (levels * torch.tensor([1, 2, 4])[:, None]).sum(1)
    bases, codes = [], []
    for size, padded in zip(sizes, code.split([-(-size // LANES) for size in sizes]), strict=True):
        codes.append(padded.flatten()[:size])
        below = torch.tensor(list(data[table + 1 :][: (columns + 1) // 2]))
        column = data[table] - torch.stack([below & 15, below >> 4], 1).flatten()[:columns]
        bases.append(column.repeat(size // columns))
        table += 1 + (columns + 1) // 2
    flat = torch.cat(codes)
    found = (torch.cat(bases) - torch.where(flat >= 8, flat - 10, flat)) % 256
    escaped = flat == 10
    found[escaped] = torch.tensor(list(data[escapes : len(data) - PAD]))
    rest = torch.tensor(list(data[signs:level]))
    values = rest >> 7 << 15 | found << 7 | rest & 0x7F
    return torch.where(values >= 1 << 15, values - (1 << 16), values).short()
