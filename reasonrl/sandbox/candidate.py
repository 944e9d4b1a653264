"""The untrusted process: loads the program and answers the tester's requests. Nothing here is trusted.

WIRE (the text of wire.py) stands above this when the file is installed in the sandbox.
"""

import builtins
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from wire import Broken, Reader, decode, dump, encode


class _Served:
    """The program's namespace and the objects that stay here under a number."""

    def __init__(self) -> None:
        self.module = types.ModuleType("candidate")
        self.objects: dict = {}
        sys.modules["candidate"] = self.module

    def handle_of(self, value):
        number = len(self.objects) + 1
        self.objects[number] = value
        return number

    def target(self, request):
        target = request["target"]
        return self.objects[target] if isinstance(target, int) else getattr(self.module, target)

    def load(self, request):
        exec(compile(request["source"], "program.py", "exec"), self.module.__dict__)
        kinds = {}
        for name, value in list(vars(self.module).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, types.ModuleType):
                kinds[name] = "module"
            elif callable(value):
                own = getattr(value, "__module__", None) == "candidate"
                kinds[name] = "function" if own else "import"
            else:
                kinds[name] = "value"
        return kinds

    def answer(self, request):
        verb = request["verb"]
        if verb == "load":
            return self.load(request)
        value = self.target(request)
        if verb == "call":
            arguments = decode(request["arguments"], self.objects.__getitem__)
            keywords = decode(request["keywords"], self.objects.__getitem__)
            return value(*arguments, **keywords)
        if verb == "attribute":
            return getattr(value, request["name"])
        if verb == "assign":
            setattr(value, request["name"], decode(request["value"], self.objects.__getitem__))
            return None
        if verb == "item":
            return value[decode(request["key"], self.objects.__getitem__)]
        if verb == "iterate":
            return [item for item, _ in zip(value, range(100_000), strict=False)]
        if verb == "length":
            return len(value)
        return str(value) if verb == "text" else value


def _serve() -> None:
    served = _Served()
    reader = Reader(3, 2**26)
    while True:
        request = reader.read()
        try:
            message = {"id": request["id"], "value": encode(served.answer(request), served.handle_of)}
        except BaseException as error:
            kind = next(
                (k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), "Exception"
            )
            message = {"id": request["id"], "error": [kind, str(error)[:500]]}
        data = dump(message)
        while data:
            data = data[os.write(4, data) :]


if __name__ == "__main__":
    try:
        _serve()
    except Broken:
        os._exit(0)
