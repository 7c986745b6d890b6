"""Which classes of ImageNet (ILSVRC 2012) overlap with classes of CIFAR-100, for FedDF's Figure 6 (a).

The paper uses only classes without overlap, "in terms of the synonyms, hyponyms, or hypernyms
of the class name" and does not print them. This list was made by that rule from the class names, in the usual order of
the classes (by synset id, as in `imagenet32`). Where it is a matter of taste (a hermit crab, a computer mouse, a rose
hip) a class counts as overlapping. Classes of CIFAR-100 that are not named here have no counterpart in ImageNet.
"""

from ..core.errors import ConfigError

CLASSES = 1000

OVERLAP: dict[str, tuple[int, ...]] = {
    "apple": (948,),
    "aquarium_fish": (1, 392, 393, 396),
    "bear": (294, 295, 296, 297),
    "beaver": (337,),
    "bed": (431, 516, 520, 564),
    "bee": (309,),
    "beetle": (300, 301, 302, 303, 304, 305, 306, 307),
    "bicycle": (444, 671),
    "bottle": (440, 720, 737, 898, 899, 901, 907),
    "bowl": (659, 809),
    "bridge": (821, 839, 888),
    "bus": (654, 779, 874),
    "butterfly": (321, 322, 323, 324, 325, 326),
    "camel": (354,),
    "can": (412, 653),
    "castle": (483,),
    "cattle": (345,),
    "chair": (423, 559, 765, 857),
    "chimpanzee": (367,),
    "clock": (409, 530, 892),
    "cockroach": (314,),
    "couch": (831,),
    "crab": (118, 119, 120, 121, 125),
    "crocodile": (49,),
    "cup": (647, 968),
    "dinosaur": (51,),
    "dolphin": (148,),
    "elephant": (101, 385, 386),
    "fox": (277, 278, 279, 280),
    "hamster": (333,),
    "kangaroo": (104,),
    "keyboard": (508, 878),
    "lamp": (470, 607, 818, 846),
    "lawn_mower": (621,),
    "leopard": (288, 289),
    "lion": (291,),
    "lizard": (38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48),
    "lobster": (122, 123),
    "man, woman, boy, girl, baby": (981, 982, 983),
    "motorcycle": (665, 670),
    "mountain": (970, 980),
    "mouse": (673,),
    "mushroom": (947, 991, 992, 993, 994, 995, 996, 997),
    "orange": (950,),
    "orchid": (986,),
    "otter": (360,),
    "pickup_truck": (717,),
    "plate": (923,),
    "porcupine": (334,),
    "rabbit": (330, 332),
    "ray": (5, 6),
    "rocket": (657, 744),
    "rose": (989,),
    "seal": (150,),
    "shark": (2, 3, 4),
    "skunk": (361,),
    "snail": (113,),
    "snake": (52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68),
    "spider": (72, 73, 74, 75, 76, 77),
    "squirrel": (335,),
    "streetcar": (829,),
    "sweet_pepper": (945,),
    "table": (526, 532, 736),
    "tank": (847,),
    "telephone": (487, 528, 707),
    "television": (851,),
    "tiger": (292,),
    "tractor": (866,),
    "train": (466,),
    "turtle": (33, 34, 35, 36, 37),
    "wardrobe": (894,),
    "whale": (147, 148),
    "wolf": (269, 270, 271, 272),
    "worm": (110, 111),
}

NAMED = "imagenet-without-cifar100"  # as a value of public.classes, optionally with a number: "NAME:100"


def named_classes(name: str) -> list[int]:
    """The classes of ImageNet that do not overlap with CIFAR-100, or so many of them, evenly spaced ("NAME:100")."""
    known, _, count = name.partition(":")
    apart = sorted(set(range(CLASSES)) - {c for classes in OVERLAP.values() for c in classes})
    wanted = len(apart) if not count else int(count) if count.isdecimal() else 0
    if known != NAMED or not 1 <= wanted <= len(apart):
        raise ConfigError(
            f"public.classes = {name!r}: expected a list of class numbers, {NAMED!r}, or {NAMED + ':N'!r} with N from "
            f"1 to {len(apart)}"
        )
    return [apart[i * len(apart) // wanted] for i in range(wanted)]
