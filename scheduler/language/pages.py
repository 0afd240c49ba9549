"""The pages in which keys and values lie, and which of them several sequences share.

A page holds PAGE tokens of one sequence, in all layers. A full page is kept after its sequence has left, under the
tokens that it and the pages before it hold; a sequence that begins with the same tokens uses it again. Pages that no
sequence uses are given away in the order in which they were left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 16  # tokens

_ROOT = -1  # the chain of a first page


@dataclass(slots=True)
class _Page:
    users: int = 0
    chain: int = 0  # number of this page's contents; never used for other contents
    key: tuple[int, tuple[int, ...]] | None = None  # the chain before it and its tokens, once it is full


class PagePool:
    """Pages by number, from 1, with the sequences that use each. Page 0 is nobody's.

    >>> pool = PagePool(4)
    >>> pages = pool.take(2)
    >>> chain = pool.keep(pages[0], range(16))
    >>> pool.leave(pages)
    >>> pool.shared(range(20)) == pages[:1]
    True
    """

    def __init__(self, count: int) -> None:
        self._pages = [_Page() for _ in range(count + 1)]
        self._empty = list(range(count, 0, -1))  # pages whose contents nobody can ask for
        self._left: OrderedDict[int, None] = OrderedDict()  # kept pages without a user, those left first in front
        self._kept: dict[tuple[int, tuple[int, ...]], int] = {}
        self._chains = 0

    @property
    def count(self) -> int:
        return len(self._pages) - 1

    @property
    def free(self) -> int:
        """Pages that no sequence uses."""
        return len(self._empty) + len(self._left)

    @property
    def kept(self) -> int:
        """Pages without a user whose contents may be used again."""
        return len(self._left)

    def take(self, n: int) -> list[int]:
        """Pages for new tokens; IndexError if there are not as many."""
        if n > self.free:
            raise IndexError(f"{n} pages are wanted and {self.free} are free")
        taken = []
        for _ in range(n):
            if self._empty:
                number = self._empty.pop()
            else:
                number, _ = self._left.popitem(last=False)
                self._forget(number)
            self._pages[number].users = 1
            taken.append(number)
        return taken

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """The kept pages with which these tokens begin. Its caller now uses them, like those of `take`."""
        found: list[int] = []
        chain = _ROOT
        for first in range(0, len(tokens) - PAGE + 1, PAGE):
            number = self._kept.get((chain, tuple(tokens[first : first + PAGE])))
            if number is None:
                break
            found.append(number)
            chain = self._pages[number].chain
        for number in found:
            self._pages[number].users += 1
            self._left.pop(number, None)
        return found

    def keep(self, number: int, tokens: Sequence[int], chain: int = _ROOT) -> int:
        """Remembers a full page by its tokens and the chain of the page before; returns the chain of this page.

        If another page has the same contents, that one stays remembered, and the chain is its chain.
        """
        key = (chain, tuple(tokens))
        other = self._kept.get(key)
        if other is not None:
            return self._pages[other].chain
        page = self._pages[number]
        self._chains += 1
        page.chain, page.key = self._chains, key
        self._kept[key] = number
        return page.chain

    def chain(self, number: int) -> int:
        """The chain of a page that `shared` returned."""
        return self._pages[number].chain

    def leave(self, pages: Sequence[int]) -> None:
        """A sequence uses these pages no more. Its last page is given away first: no other contents build on it."""
        for number in reversed(pages):
            page = self._pages[number]
            page.users -= 1
            if page.users == 0:
                if page.key is None:
                    self._empty.append(number)
                else:
                    self._left[number] = None

    def forget(self) -> None:
        """Forgets the contents of all pages without a user, after their memory was given away."""
        while self._left:
            number, _ = self._left.popitem()
            self._forget(number)
            self._empty.append(number)

    def check(self) -> None:
        """Raises AssertionError if a page is both used and free, or neither."""
        free = [*self._empty, *self._left]
        assert len(set(free)) == len(free), "a page is free twice"
        used = {number for number, page in enumerate(self._pages) if page.users}
        assert used.isdisjoint(free), "a used page is free"
        assert len(used) + len(free) == self.count, "a page is lost"
        assert all(self._pages[number].key == key for key, number in self._kept.items()), "a kept page has another key"

    def _forget(self, number: int) -> None:
        page = self._pages[number]
        if page.key is not None:
            del self._kept[page.key]
            page.key = None
