"""The same function on Spark: `python examples/spark_clicks.py [PARALLELISM]`, then again with another number.

Reads `clicks/*.jsonl` in the folder where it is started, takes everything that has come since the last time, and ends.
"""

import sys

from clicks import CountPerUser

from spark_integration import spark_session, stateful

spark = spark_session("local[2]", app_name="clicks")
clicks = spark.readStream.schema("user string, page string").json("clicks")
counts = stateful(clicks, key="user", function=CountPerUser(), output="user string, n bigint", uid="count",
                  checkpoint="spark-state", parallelism=int(sys.argv[1]) if len(sys.argv) > 1 else 2)
query = (counts.writeStream.format("json").option("path", "spark-counts")
         .option("checkpointLocation", "spark-checkpoint").trigger(availableNow=True).start())
query.awaitTermination()
batches = [batch for batch in query.recentProgress if batch["numInputRows"]]
seconds = sum(batch["durationMs"]["triggerExecution"] for batch in batches) / 1000
print(f"{sum(batch['numInputRows'] for batch in batches):,} rows in {seconds:.1f} s, {len(batches)} batches")
spark.stop()
