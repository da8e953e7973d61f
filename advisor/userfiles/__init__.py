"""A run that is thrown away leaves the user's files as they were: what the script is about to change is set aside first, and put back.

So with `profile` (not with `--keep-running`), every process of `apply`, `perf.measure` of a script, and `bench models`. In the script's
process an audit hook sees every open, remove, rename, mkdir, rmdir, chmod, chown and utime that Python code makes, before it happens, in
DataLoader workers and ranks too: guard.py, events.py. At the first touch of a path the journal says what was there: the original goes
to `kept-aside/` (a second name or a rename where the file system allows, so a large checkpoint costs nothing), or the path
is noted as new (journal.py). The script then works on real paths, so reading back, copying and rotating its own checkpoints
just works. A file that is written to in place is copied, by a clone where the file system can; no other file is ever copied.

`restore` reads the journal: what the script made is moved to `diverted/`, what was there before is put back (restore.py). The
supervisor calls it after every process; after a `kill -9` of everything, `restore_pending` does at the next start, unless
somebody still works there (owners.py).

Python processes that the script starts are guarded as it is itself; before another program starts (a shell, `cp`, `rm`),
what its words name is set aside (programs.py). Functions that write natively, where Python sees nothing, are wrapped in
those packages that people write checkpoints and images with (native_writers.py). What is not covered: files written by
other native libraries, and by programs under names that they were not given.
"""
