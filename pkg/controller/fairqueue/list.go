// SPDX-License-Identifier: Apache-2.0

package fairqueue

// list is a doubly linked list whose elements are fields of the values. Unlike container/list it
// allocates nothing: 100,000 requests would need 300,000 allocations.
type list[T any] struct {
	first, last *element[T]
}

// element is a place in at most one list. value is set once, and points to the struct that contains
// the element.
type element[T any] struct {
	prev, next *element[T]
	value      T
}

func (l *list[T]) empty() bool { return l.first == nil }

func (l *list[T]) pushBack(e *element[T]) {
	e.prev, e.next = l.last, nil
	if l.last == nil {
		l.first = e
	} else {
		l.last.next = e
	}
	l.last = e
}

// remove takes an element out of the list that it is in.
func (l *list[T]) remove(e *element[T]) {
	if e.prev == nil {
		l.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		l.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
}

func (l *list[T]) moveToBack(e *element[T]) {
	if l.last != e {
		l.remove(e)
		l.pushBack(e)
	}
}
