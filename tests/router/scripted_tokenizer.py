"""The tokenizer's program with a script in place of the tokenizer: `... -m THIS SOURCE`."""

import os
import threading

import numpy as np

from kappa_router.api.tokenizer import main


class Script:
    """What a text asks for; any other text gives its bytes."""

    def tokens(self, plain, most_tokens, tenant):
        match plain["text"]:
            case "hang":
                threading.Event().wait()
            case "die":
                os._exit(3)
            case "memory":
                return np.ones(1 << 31)
            case "refuse":
                raise ValueError("the prompt says: swordfish")
        return np.frombuffer(plain["text"].encode(), dtype=np.uint8)


if __name__ == "__main__":
    main([""], lambda _source: Script())
