"""Runs in a container: writes into the region of HAMi-core what a hostile tenant may write. Arguments: OFFSET FORMAT VALUE, repeated, or
`size BYTES`. See gpumgr/enforcement/hami_core/layout.py for the offsets."""

import struct
import sys

with open("/tmp/cudevshr.cache", "r+b") as region:
    words = sys.argv[1:]
    if words[0] == "size":
        region.truncate(int(words[1]))
    else:
        for offset, form, value in zip(words[::3], words[1::3], words[2::3], strict=True):
            region.seek(int(offset))
            region.write(struct.pack("<" + form, int(value)))
