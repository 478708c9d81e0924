"""`make demo`: one job killed and restored, its savepoint opened by others, its function run on Spark; figures compared."""
