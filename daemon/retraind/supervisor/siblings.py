"""Which files of a worker's may lie beside its weights in a version: a pure rule on their names, sizes and number.

The gate asks it for its verdict, and the build of a version once more, since a name becomes a path there.
"""

from retraind.report import SiblingFile

# What a worker may put beside its weights: enough for whatever uses a model, little enough to be held in memory.
MAX_SIBLINGS = 16
MAX_SIBLING_BYTES = 8 * 2**20
# Names that a version's directory gives to files of the supervisor's own.
OWN_NAMES = ("weights.pt", "manifest.json", "report.html")


def unfit(siblings: list[SiblingFile]) -> str:
    """Why a worker's files can not lie beside its weights, in words; empty when they can.

    A name becomes a path in the models directory: plain, short, not hidden, and nobody else's.
    """
    names = [sibling.name for sibling in siblings]
    if len(names) > MAX_SIBLINGS or len(set(names)) < len(names):
        return f"at most {MAX_SIBLINGS} files of different names may lie beside the weights, not {len(names)}"
    for sibling in siblings:
        name = sibling.name
        is_plain = name.isascii() and name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum()
        if not is_plain or name.startswith(".") or len(name) > 100:
            return f"{ascii(name)[:120]} must be a plain name: letters, digits and _.- only, not hidden"
        if name in OWN_NAMES or name.endswith(".sig"):
            return f"{name} is a name that a version keeps for a file of its own"
        if not 0 <= sibling.num_bytes <= MAX_SIBLING_BYTES:
            return f"{name} has {sibling.num_bytes} bytes, at most {MAX_SIBLING_BYTES} may lie beside the weights"
    return ""
