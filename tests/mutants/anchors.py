"""Find the text of a fault in a definition, whatever file the definition is in and however it is formatted.

A definition is a function, a class, or a name that a module assigns to; the other statements of a module are
``<module>``. Each token of a file belongs to the innermost definition around it, so the text of a class does not
include its methods. Texts are compared token by token. Comments, line breaks inside brackets, trailing commas, and
parentheses around a whole value are ignored, because a formatter adds and removes them.

A string is compared as it is written: neither another kind of quotes nor adjacent pieces joined to one are the same.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import keyword
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MODULE = "<module>"
SHOWN = 5
"""The most names that an error lists."""


class StaleError(Exception):
    """A fault cannot be applied; the message says why."""


class Token(NamedTuple):
    """A token: the word that it is compared by, its place in the text, and its line."""

    word: str
    start: int
    end: int
    line: int


_BLOCKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>"}
_BREAKS = set(_BLOCKS.values())
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SIGNS = (f"{sign}=" for sign in ("//", ">>", "<<", "**", *"+-*/%@&|^"))
_AROUND_A_TUPLE = {*_BREAKS, "=", "return", "import", *_SIGNS}, {"\n", "="}
_KEYWORDS = {"in", "if", "elif", "else", "while", "with", "assert", "raise"}
_AROUND_A_VALUE = _AROUND_A_TUPLE[0] | {*"([{,:", "->", ":="} | _KEYWORDS, _AROUND_A_TUPLE[1] | {*")]},:", "else"}
"""The words before and after a tuple, and another value, between which it needs no parentheses."""


class Text:
    """The tokens of a text, without those that are ignored.

    Args:
        text: The text.
        part: Whether the text is a part of a file: line breaks and indentation at its ends are then ignored.
        whole: Whether to take the ends of the text for the ends of a value, so that parentheses there can be ignored.

    Attributes:
        text: The text.
        tokens: The tokens that are compared.
        commas: The trailing commas, which are ignored.
        pairs: The start of each opening parenthesis that is ignored, and the end of the closing one.

    Raises:
        SyntaxError: The text is not made of whole tokens and pairs of brackets.
    """

    def __init__(self, text: str, *, part: bool = False, whole: bool = True) -> None:
        self.text = text
        tokens = _tokens(text)
        if part:
            kept = [i for i, token in enumerate(tokens) if token.word not in _BREAKS]
            tokens = tokens[kept[0] : kept[-1] + 1] if kept else []
        pairs, commas = _ignored([token.word for token in tokens], "\n" if whole else "")
        ignored = {i for pair in pairs for i in pair} | commas
        self.tokens = [token for i, token in enumerate(tokens) if i not in ignored]
        self.commas = [tokens[i] for i in commas]
        self.pairs = [(tokens[first].start, tokens[last].end) for first, last in pairs]

    @property
    def words(self) -> list[str]:
        """The words of the tokens."""
        return [token.word for token in self.tokens]

    def splits_a_pair(self, tokens: Sequence[Token]) -> bool:
        """Return whether one parenthesis of an ignored pair is between these tokens and the other one is not."""
        if not tokens:
            return False
        start, end = tokens[0].start, tokens[-1].end
        return any((start <= first < end) != (start < last <= end) for first, last in self.pairs)

    def in_a_pair(self) -> bool:
        """Return whether parentheses that are ignored are around the whole text."""
        return any(first < self.tokens[0].start and last > self.tokens[-1].end for first, last in self.pairs)


def _tokens(text: str) -> list[Token]:
    starts = list(itertools.accumulate((len(row) + 1 for row in text.split("\n")), initial=0))
    found: list[Token] = []
    opened: list[tuple[int, int]] = []
    try:
        for kind, word, (line, column), (last, end_column), _ in tokenize.generate_tokens(io.StringIO(text).readline):
            if kind in _IGNORED:
                continue
            start, end, name = starts[line - 1] + column, starts[last - 1] + end_column, tokenize.tok_name[kind]
            if name.endswith("STRING_START"):
                # Python 3.12 and later cut an f-string into many tokens, earlier versions do not.
                opened.append((start, line))
            elif name.endswith("STRING_END"):
                start, line = opened.pop()
                if not opened:
                    found.append(Token(text[start:end], start, end, line))
            elif not opened and kind == tokenize.ERRORTOKEN:
                if word.strip():
                    raise SyntaxError(f"{word!r} is not a token")
            elif not opened:
                found.append(Token(_BLOCKS.get(kind, word), start, end, line))
    except tokenize.TokenError as error:
        raise SyntaxError(str(error.args[0])) from error
    return found


def _ignored(words: Sequence[str], around: str) -> tuple[list[tuple[int, int]], set[int]]:
    """Return the indices of parentheses around a whole value, in pairs, and of trailing commas.

    Args:
        words: The words of a text.
        around: The word before the first and after the last of them.
    """
    pairs, trailing = [], set()
    opened: list[tuple[int, list[int]]] = []
    """The indices of open brackets, each with those of the commas directly inside it."""
    words = [around, *words, around]
    for i, word in enumerate(words):
        if word in _CLOSING:
            opened.append((i, []))
        elif word == "," and opened:
            opened[-1][1].append(i)
        elif word in _CLOSING.values():
            if not opened or _CLOSING[words[opened[-1][0]]] != word:
                raise SyntaxError(f"{word!r} closes no bracket")
            first, commas = opened.pop()
            before, after = words[first - 1], words[i + 1]
            named = before in _CLOSING.values() or (before.isidentifier() and not keyword.iskeyword(before))
            single = commas == [i - 1]
            # A single comma makes a tuple in (a,) and x[a,], but not in f(a,) and [a,].
            if commas and commas[-1] == i - 1 and (not single or named == (word == ")")):
                trailing.add(i - 2)
            befores, afters = _AROUND_A_TUPLE if commas else _AROUND_A_VALUE
            alone = (before in befores and after in afters) or (before, after) == ("for", "in")
            if word == ")" and alone and i > first + 1 and not single:
                pairs.append((first - 1, i - 1))
    if opened:
        raise SyntaxError(f"{words[opened[-1][0]]!r} is not closed")
    return pairs, trailing


class Source:
    """A Python file and its definitions by name; a name may be defined several times, by overloads for example."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.definitions: dict[str, list[Definition]] = {}
        self._define((MODULE,), 1, self.text.count("\n") + 1, None)
        self._add(ast.parse(self.text), (), self.definitions[MODULE][0])

    def _define(self, names: Sequence[str], first: int, last: int, around: Definition | None) -> Definition:
        found = Definition(self.text, first, last)
        if around:
            around.inside.append(found)
        for name in names:
            self.definitions.setdefault(name, []).append(found)
        return found

    def _add(self, node: ast.AST, within: tuple[str, ...], around: Definition) -> None:
        """Add the definitions in a node.

        Args:
            node: A node of the file.
            within: The names of the functions and classes around it.
            around: The innermost definition around it.
        """
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                continue
            inside, innermost = within, around
            last = getattr(child, "end_lineno", 0)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = (*within, child.name)
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                innermost = self._define([".".join(inside)], first, last, around)
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and not within:
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                used = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                names = [each.id for each in used if isinstance(each.ctx, ast.Store)]
                if names:
                    innermost = self._define(names, child.lineno, last, around)
            self._add(child, inside, innermost)

    def find(self, name: str, words: Sequence[str]) -> list[tuple[Definition, list[Token]]]:
        """Return the occurrences of words in the definitions of a name."""
        return [(each, at) for each in self.definitions[name] for at in each.find(words)]

    def holders(self, words: Sequence[str]) -> list[str]:
        """Return the names of the definitions in which words occur."""
        return sorted(name for name in self.definitions if self.find(name, words))


class Definition:
    """A definition in a file.

    Attributes:
        first: The number of its first line.
        last: The number of its last line.
        inside: The definitions in it, which are no part of it.
    """

    def __init__(self, file: str, first: int, last: int) -> None:
        self._file, self.first, self.last = file, first, last
        self.inside: list[Definition] = []

    @functools.cached_property
    def _whole(self) -> Text:
        return Text("\n".join(self._file.split("\n")[self.first - 1 : self.last]))

    @functools.cached_property
    def _runs(self) -> list[list[Token]]:
        """The tokens, cut where another definition is between them."""
        owners: list[Definition] = [self] * (self.last - self.first + 3)
        for each in self.inside:
            owners[each.first - self.first : each.last + 1 - self.first] = [each] * (each.last + 1 - each.first)
        runs = itertools.groupby(self._whole.tokens, key=lambda token: owners[token.line - 1])
        return [list(tokens) for owner, tokens in runs if owner is self]

    def line(self, token: Token) -> int:
        """Return the number of the line of the file that a token is in."""
        return self.first + token.line - 1

    def find(self, words: Sequence[str]) -> list[list[Token]]:
        """Return the occurrences of words."""
        found = []
        for run in self._runs:
            has = [token.word for token in run]
            places = [i for i in range(len(has) - len(words) + 1) if has[i : i + len(words)] == words]
            found += [run[i : i + len(words)] for i in places]
        return found

    def replaced(self, at: Sequence[Token], old: Text, new: Text) -> str:
        """Return the text of the file with an occurrence of ``old`` replaced.

        Only the tokens that differ between ``old`` and ``new`` are replaced, unless the difference spans statements or
        ends within parentheses that are ignored.

        Args:
            at: The occurrence.
            old: The text to replace.
            new: The text in its place.
        """
        had, has = old.words, new.words
        limit, head, tail = min(len(had), len(has)), 0, 0
        while head < limit and had[head] == has[head]:
            head += 1
        while tail < limit - head and had[-1 - tail] == has[-1 - tail]:
            tail += 1
        gone, come = at[head : len(had) - tail], new.tokens[head : len(has) - tail]
        spans = any(token.word in _BREAKS for token in (*gone, *come))
        if spans or old.in_a_pair() or new.splits_a_pair(come) or self._whole.splits_a_pair(gone):
            return self._with(at[0].start, at[-1].end, self._indented(at[0], old, new), old.in_a_pair())
        if gone:
            inserted = new.text[come[0].start : come[-1].end] if come else ""
            return self._with(gone[0].start, gone[-1].end, inserted)
        # An insertion comes with the space on one side of it, and belongs inside ignored parentheses that open there.
        end = at[head - 1].end if head else at[0].start
        start = at[head].start if tail else end
        if head == 0 or any(end <= first < start for first, _ in self._whole.pairs):
            return self._with(start, start, new.text[come[0].start : new.tokens[head + len(come)].start])
        return self._with(end, end, new.text[new.tokens[head - 1].end : come[-1].end])

    def _with(self, start: int, end: int, inserted: str, around: bool = False) -> str:
        """Return the text of the file with a part replaced, and the ignored tokens that make no sense without it.

        Args:
            start: Where the part begins.
            end: Where it ends.
            inserted: The text in its place.
            around: Whether to replace ignored parentheses around the part, too.
        """
        text = self._whole.text
        preceding = max([token.end for token in self._whole.tokens if token.end <= start], default=0)
        following = min([token.start for token in self._whole.tokens if token.start >= end], default=len(text))
        for first, last in self._whole.pairs:
            opens, closes = preceding <= first < start, end < last <= following
            if (opens and closes and around) or (opens and start < last <= end) or (closes and start <= first < end):
                start, end = min(start, first), max(end, last)
        if not inserted:
            end = max([end, *(comma.end for comma in self._whole.commas if end <= comma.start < following)])
            # A statement that loses its first word keeps its indentation.
            while text[start - 1 : start].isspace() and text[end : end + 1] == " ":
                end += 1
        lines = self._file.split("\n")
        lines[self.first - 1 : self.last] = [text[:start] + inserted + text[end:]]
        return "\n".join(lines)

    def _indented(self, first: Token, old: Text, new: Text) -> str:
        """Return the new text, indented to stand where the first token of the old one is."""
        text = self._whole.text
        depth = max(0, _depth(text[text.rfind("\n", 0, first.start) + 1 :]) - _depth(old.text.strip("\n")))
        rows = new.text.strip().split("\n")
        return "\n".join([rows[0], *(" " * depth + row if row.strip() else "" for row in rows[1:])])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


class Sources:
    """The Python files of a package, each read once, and the files that define each name."""

    def __init__(self, package: Path) -> None:
        self.package = package
        paths = sorted(package.rglob("*.py"))
        self.files = {path.relative_to(package).as_posix(): Source(path) for path in paths}
        self.homes: dict[str, list[str]] = {}
        for file, source in self.files.items():
            for name in source.definitions:
                self.homes.setdefault(name, []).append(file)

    def home(self, name: str, path: str | None = None) -> str:
        """Return the file that defines a name.

        Args:
            name: A qualified name.
            path: The file, or a folder around it; None for the whole package.

        Raises:
            StaleError: There is no such path, or no file there defines the name, or several do.
        """
        everywhere = self.homes.get(name, [])
        homes = [file for file in everywhere if path is None or file == path or file.startswith(f"{path}/")]
        place = "" if path is None else f" in {path}"
        if path is not None and not (self.package / path).exists():
            raise StaleError(f"there is no {path}{_listed(f'; {name} is defined in', everywhere)}")
        if not homes and everywhere:
            raise StaleError(f"there is no definition of {name}{place}{_listed('; it is defined in', everywhere)}")
        if not homes:
            last = name.rpartition(".")[2]
            alike = sorted(each for each in self.homes if each.rpartition(".")[2] == last)
            raise StaleError(f"there is no definition of {name}{_listed('; there is one of', alike)}")
        if len(homes) > 1:
            raise StaleError(
                f"{name} is defined in several files{place}: 'path' has to name one{_listed(' of', homes)}"
            )
        return homes[0]

    def changed(self, file: str, name: str, old: str, new: str) -> str:
        """Return the text of a file with a part of a definition replaced.

        Args:
            file: A file that defines the name.
            name: The qualified name of the definition.
            old: The text to replace.
            new: The text in its place.

        Raises:
            StaleError: ``old`` does not occur exactly once, ``new`` is the same, or the result is not Python.
        """
        source = self.files[file]
        before, after = _part("old", old, whole=False), _part("new", new, whole=False)
        if not before.words:
            raise StaleError("its 'old' is empty")
        found = source.find(name, before.words)
        if not found:
            before, after = _part("old", old, whole=True), _part("new", new, whole=True)
            found = source.find(name, before.words)
        if len(found) != 1:
            lines = [str(definition.line(at[0])) for definition, at in found]
            hint = _listed(": in lines", lines) if lines else _listed("; it occurs in", source.holders(before.words))
            raise StaleError(f"its 'old' occurs {len(found)} times in {name} ({file}), not once{hint}")
        if before.words == after.words:
            raise StaleError("it changes nothing")
        definition, at = found[0]
        text = definition.replaced(at, before, after)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise StaleError(f"the changed file is not Python: {error}") from error
        return text


def _part(key: str, text: str, *, whole: bool) -> Text:
    try:
        return Text(text, part=True, whole=whole)
    except SyntaxError as error:
        raise StaleError(f"its {key!r} is not made of whole tokens and brackets: {error.msg}") from error


def _listed(before: str, names: Sequence[str]) -> str:
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return f"{before} {', '.join([*names[:SHOWN], *more])}" if names else ""
