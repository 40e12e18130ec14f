"""Every mutation of mutations.txt says something about the present code: `make mutations` takes an hour, this a second."""

from collections import Counter

from tests.mutations import Mutation, listed, stale


def test_no_mutation_is_stale():
    """Who changes the text that a mutation replaces writes the mutation anew, for the fault that its name says."""
    lines = [f"{mutation.name}: {why}" for mutation in listed() if (why := stale(mutation))]
    assert not lines, "\n".join(["stale in tests/mutations.txt:", *lines])


def test_a_name_is_that_of_one_mutation():
    names = Counter(mutation.name for mutation in listed())
    assert not [name for name, count in names.items() if count > 1]


def test_stale_mutations_are_found(tmp_path):
    (tmp_path / "xfresearch").mkdir()
    (tmp_path / "xfresearch" / "a.py").write_text("x = 1\ny = 2\nz = 2\n")
    (tmp_path / "tests").mkdir()
    good = Mutation("a", "a.py", "x = 1", "x = 3", ["tests/", "-k", "x"])
    assert stale(good, tmp_path) == ""
    wrongs = {
        "its text occurs 0 times in a.py": {"old": "x = 4"},
        "its text occurs 2 times in a.py": {"old": "= 2"},
        "its text occurs 0 times in b.py": {"file": "b.py"},
        "it changes nothing in a.py": {"new": "x  = 1 "},
        "there is no tests/b.py": {"pytest": ["tests/b.py::test_x"]},
        "it names no test": {"pytest": ["-k", "x"]},
    }
    for text, changes in wrongs.items():
        assert stale(good._replace(**changes), tmp_path) == text
