//! What is measured: experiments, each with an axis and points, in the order of the report.

use crate::brokers::{find, Broker, Kind};
use crate::pairs::{Own, Pair};
use crate::services::{Served, Service};

/// A number that an experiment shows.
#[derive(Clone, Copy)]
pub struct Metric {
    /// Its name in what the client says, or `cpu_msg`, `cpu_gb`.
    pub key: &'static str,
    /// What it is, with its unit.
    pub label: &'static str,
    /// Whether more is better.
    pub more: bool,
}

/// The limit of the link itself that a chart shows as a line.
#[derive(Clone, Copy, PartialEq)]
pub enum Limit {
    /// None makes sense.
    No,
    /// Round trips of this many messages there and back at each point.
    Trip,
    /// One way.
    Flow,
}

/// One point of an experiment's axis.
pub struct Point {
    /// Its label.
    pub x: String,
    /// The size of a message, for the limit.
    pub size: usize,
    /// What is run.
    pub pair: Box<dyn Pair>,
}

/// One experiment: one row of charts.
pub struct Experiment {
    /// A short name for `--only`, files and anchors.
    pub name: &'static str,
    /// The heading.
    pub title: String,
    /// What the programs do, and after whose experiment.
    pub what: &'static str,
    /// What the axis means.
    pub axis: &'static str,
    /// What is shown, the most important first.
    pub metrics: Vec<Metric>,
    /// The line of the limit, for the first metric.
    pub limit: Limit,
    /// The points.
    pub points: Vec<Point>,
}

impl Experiment {
    /// A program that is not installed here, though its server or its client needs it.
    pub fn missing(&self, server: bool, client: bool) -> Option<&'static str> {
        let (a, b) = self.points.first()?.pair.programs();
        let want = |on, all: &[&'static str]| all.iter().copied().find(|p| on && find(p).is_none());
        want(server, a).or_else(|| want(client, b))
    }

    /// Leaves out what says nothing between hosts, whose clocks differ.
    pub fn between_hosts(&mut self) {
        self.metrics.retain(|m| m.key != LAG.key);
    }
}

const P50: Metric = Metric { key: "p50", label: "median latency, µs", more: false };
/// From the client's clock to the server's: means something on one host only.
const LAG: Metric = Metric { key: "lag", label: "median latency, µs", more: false };
const P99: Metric = Metric { key: "p99", label: "99th percentile, µs", more: false };
const RATE: Metric = Metric { key: "rate", label: "messages per second", more: true };
const MB: Metric = Metric { key: "mb", label: "MB per second", more: true };
const GOOD: Metric = Metric { key: "goodput", label: "MB per second at all subscribers", more: true };

fn own(server: &str, client: &str) -> Box<dyn Pair> {
    let words = |s: &str| s.split_whitespace().map(String::from).collect();
    Box::new(Own { server: words(&format!("load-server {server}")), client: words(&format!("load-client {client}")) })
}

fn size_name(n: usize) -> String {
    match n {
        n if n >= 1 << 20 => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

/// Points over sizes: the same words for server and client, in which `SIZE` is replaced.
fn sizes(sizes: &[usize], server: &str, client: &str) -> Vec<Point> {
    let at = |s: &str, n: usize| s.replace("SIZE", &n.to_string());
    let point = |&n: &usize| Point { x: size_name(n), size: n, pair: own(&at(server, n), &at(client, n)) };
    sizes.iter().map(point).collect()
}

/// Points over anything: label, server's words, client's words.
fn each(rows: &[(&str, &str, &str)]) -> Vec<Point> {
    rows.iter().map(|(x, s, c)| Point { x: x.to_string(), size: 1024, pair: own(s, c) }).collect()
}

/// All experiments, whatever is installed.
pub fn all(quick: bool, secs: f64) -> Vec<Experiment> {
    let mut v = basics(quick);
    v.extend(log_broker(quick));
    v.extend(streams(quick));
    v.extend(netty(quick));
    v.extend(pubsub(quick));
    v.extend(Kind::ALL.map(|kind| broker(kind, quick, secs)));
    v.extend(Service::ALL.iter().filter(|s| !quick || !s.is_heavy()).map(|s| service(*s, quick)));
    v
}

fn pick<'a, T>(quick: bool, few: &'a [T], many: &'a [T]) -> &'a [T] {
    if quick {
        few
    } else {
        many
    }
}

const K: usize = 1 << 10;

fn basics(quick: bool) -> Vec<Experiment> {
    let some = pick(quick, &[64, K, 16 * K, 64 * K], &[16, 64, 256, K, 4 * K, 16 * K, 64 * K, 256 * K]);
    vec![
        Experiment {
            name: "trips",
            title: "Round trip on one connection, blocking calls".into(),
            what: "A message goes there and comes back; every byte is compared.",
            axis: "message",
            metrics: vec![P50, P99],
            limit: Limit::Trip,
            points: sizes(some, "trips --size SIZE", "trips --size SIZE"),
        },
        Experiment {
            name: "setup",
            title: "Short connections: connect, one message there and back, close".into(),
            what: "Such connections are too short for a ring and should cost no more than without the library.",
            axis: "",
            metrics: vec![
                Metric { key: "rate", label: "connections per second", more: true },
                Metric { key: "median", label: "median time of one, µs", more: false },
            ],
            limit: Limit::No,
            points: {
                let job = |role: &str| {
                    let n = if quick { "2000" } else { "8000" };
                    [role, "setup", "64", n, "100"].map(String::from).to_vec()
                };
                let pair = Box::new(Own { server: job("@serve"), client: job("@client") });
                vec![Point { x: "64 B".into(), size: 64, pair }]
            },
        },
    ]
}

fn log_broker(quick: bool) -> Vec<Experiment> {
    let latency = pick(quick, &[32, K, 128 * K], &[32, 128, 512, K, 4 * K, 16 * K, 64 * K, 128 * K]);
    let flow = pick(quick, &[32, K, 32 * K], &[32, 128, 512, K, 4 * K, 32 * K, 128 * K]);
    vec![
        Experiment {
            name: "log-produce-latency",
            title: "Log broker: acknowledged produce by record size".into(),
            what: "One producer waits for each record's acknowledgement (after KafkaDirect, produce latency).",
            axis: "record",
            metrics: vec![P50, P99],
            limit: Limit::No,
            points: sizes(latency, "kafka", "kafka --mode produce --size SIZE"),
        },
        Experiment {
            name: "log-produce",
            title: "Log broker: produce throughput by record size".into(),
            what: "Sixteen records in one write, not acknowledged; the broker checks each and counts them at the end.",
            axis: "record",
            metrics: vec![MB, RATE],
            limit: Limit::Flow,
            points: sizes(flow, "kafka", "kafka --mode produce --acks 0 --batch 16 --size SIZE"),
        },
        Experiment {
            name: "log-batching",
            title: "Log broker: small records of 64 B, gathered in writes".into(),
            what: "How much of the gain remains when the program itself gathers small records.",
            axis: "records in a write",
            metrics: vec![RATE],
            limit: Limit::No,
            points: pick(quick, &[1, 64], &[1, 4, 16, 64, 256])
                .iter()
                .map(|n| {
                    let c = format!("kafka --mode produce --acks 0 --size 64 --batch {n}");
                    Point { x: n.to_string(), size: 64, pair: own("kafka", &c) }
                })
                .collect(),
        },
        Experiment {
            name: "log-partitions",
            title: "Log broker: partitions, a producer each, 1 KiB acknowledged".into(),
            what: "Each producer has a connection of its own and waits for each acknowledgement.",
            axis: "partitions",
            metrics: vec![RATE, P50],
            limit: Limit::No,
            points: pick(quick, &[1, 4], &[1, 2, 4, 8, 16])
                .iter()
                .map(|n| {
                    let c = format!("kafka --mode produce --partitions {n}");
                    Point { x: n.to_string(), size: K, pair: own(&format!("kafka --partitions {n}"), &c) }
                })
                .collect(),
        },
        Experiment {
            name: "log-24",
            title: "Log broker: 24 partitions with and without guaranteed delivery".into(),
            what: "24 producers of 1 KiB records: sent only; acknowledged; acknowledged after a synchronised write to \
                   a file (after the study of brokers on RDMA and non-volatile memory).",
            axis: "guarantee",
            metrics: vec![RATE],
            limit: Limit::No,
            points: each(&[
                ("sent", "kafka --partitions 24", "kafka --mode produce --acks 0 --partitions 24"),
                ("acknowledged", "kafka --partitions 24", "kafka --mode produce --partitions 24"),
                ("synchronised", "kafka --partitions 24 --sync /tmp", "kafka --mode produce --partitions 24"),
            ]),
        },
        Experiment {
            name: "log-replication",
            title: "Log broker: replication factor, 1 KiB, acknowledged by all".into(),
            what: "The leader sends each record to its followers, processes of their own, and waits for all.",
            axis: "replicas",
            metrics: vec![P50, RATE],
            limit: Limit::No,
            points: pick(quick, &[1, 2, 4], &[1, 2, 3, 4])
                .iter()
                .map(|n| {
                    let s = format!("kafka --followers {}", n - 1);
                    Point { x: n.to_string(), size: K, pair: own(&s, "kafka --mode produce") }
                })
                .collect(),
        },
        Experiment {
            name: "log-consume",
            title: "Log broker: consume by record size".into(),
            what: "A consumer fetches up to 64 KiB of records at a time and checks each.",
            axis: "record",
            metrics: vec![MB, P50],
            limit: Limit::Flow,
            points: sizes(flow, "kafka", "kafka --mode consume --size SIZE"),
        },
        Experiment {
            name: "log-empty",
            title: "Log broker: fetches of an empty partition".into(),
            what: "What a consumer costs that has nothing to consume.",
            axis: "consumers",
            metrics: vec![RATE, P50],
            limit: Limit::No,
            points: each(&[
                ("1", "kafka", "kafka --mode empty"),
                ("4", "kafka --partitions 4", "kafka --mode empty --partitions 4"),
            ]),
        },
        Experiment {
            name: "log-end-to-end",
            title: "Log broker: from producer to waiting consumer, 2000 records a second".into(),
            what: "The time from the production of a record to its arrival at a consumer that waits in a fetch.",
            axis: "record",
            metrics: vec![P50, P99],
            limit: Limit::No,
            points: sizes(
                pick(quick, &[K, 32 * K], &[64, K, 8 * K, 32 * K]),
                "kafka",
                "kafka --mode e2e --rate 2000 --size SIZE",
            ),
        },
    ]
}

fn streams(quick: bool) -> Vec<Experiment> {
    let buffers = pick(quick, &[K, 32 * K, 1024 * K], &[K, 4 * K, 16 * K, 32 * K, 64 * K, 256 * K, 1024 * K]);
    vec![
        Experiment {
            name: "channel",
            title: "Stream channel by buffer size".into(),
            what: "Full buffers one way on one connection; the receiver checks each (after Slash).",
            axis: "buffer",
            metrics: vec![MB, LAG],
            limit: Limit::Flow,
            points: sizes(buffers, "channel --size SIZE", "channel --size SIZE"),
        },
        Experiment {
            name: "channel-threads",
            title: "Stream channels of 32 KiB buffers by threads".into(),
            what: "A sending and a receiving thread for each connection.",
            axis: "threads",
            metrics: vec![MB],
            limit: Limit::No,
            points: pick(quick, &[2], &[1, 2, 4, 8])
                .iter()
                .map(|n| {
                    let c = format!("channel --size 32k --conns {n}");
                    Point { x: n.to_string(), size: 32 * K, pair: own("channel --size 32k", &c) }
                })
                .collect(),
        },
        Experiment {
            name: "window",
            title: "Queries over streams: counting, and views of campaigns in windows".into(),
            what: "Two workers. One process counts all events (a read-only query); or the workers filter events, join \
                   them with their campaigns, and send each to the owner of its campaign, or partial counts to a \
                   leader at each window's end; campaigns uniform or skewed (after Slash and the Yahoo benchmark).",
            axis: "plan",
            metrics: vec![Metric { key: "rate", label: "events per second", more: true }],
            limit: Limit::No,
            points: each(&[
                ("count", "window --mode count", "window --mode count --workers 2"),
                ("repartition", "window --mode repartition", "window --mode repartition --workers 2"),
                ("repartition, skewed", "window --mode repartition", "window --mode repartition --workers 2 --skew 1"),
                ("partial", "window --mode partial", "window --mode partial --workers 2"),
                ("partial, skewed", "window --mode partial", "window --mode partial --workers 2 --skew 1"),
            ]),
        },
    ]
}

/// hadroNIO's matrix: messages of 16 B, 1 KiB and 64 KiB on 1 to 16 connections, or gathered; the middle one if quick.
fn netty(quick: bool) -> Vec<Experiment> {
    let conns = pick(quick, &[1, 16], &[1, 2, 4, 8, 16]);
    let loads: &[usize] = pick(quick, &[16, K, 64 * K], &[16, 256, K, 8 * K, 64 * K]);
    let matrix = pick(quick, &[K], &[16, K, 64 * K]);
    let over = |axis: &[usize], size: usize, f: &dyn Fn(usize) -> (String, String)| -> Vec<Point> {
        let point = |&n: &usize| {
            let (s, c) = f(n);
            Point { x: n.to_string(), size, pair: own(&s, &c) }
        };
        axis.iter().map(point).collect()
    };
    let named = |of: [&'static str; 3], size: usize| match size {
        16 => of[0],
        K => of[1],
        _ => of[2],
    };
    let mut all = vec![Experiment {
        name: "netty-trips",
        title: "Event loops: round trip by message size".into(),
        what: "One epoll loop on each side, one connection, as netty has it (after hadroNIO).",
        axis: "message",
        metrics: vec![P50, P99],
        limit: Limit::Trip,
        points: sizes(loads, "netty --size SIZE", "netty --size SIZE"),
    }];
    all.extend(matrix.iter().map(|&size| Experiment {
        name: named(["netty-connections-16", "netty-connections", "netty-connections-64k"], size),
        title: format!("Event loops: round trips of {} by connections", size_name(size)),
        what: "All connections of a side in one loop.",
        axis: "connections",
        metrics: vec![RATE, P50],
        limit: Limit::No,
        points: over(conns, size, &|n| (format!("netty --size {size}"), format!("netty --size {size} --conns {n}"))),
    }));
    all.push(Experiment {
        name: "netty-throughput",
        title: "Event loops: throughput by message size, flushed every 16".into(),
        what: "Sixteen connections; sixteen messages in one gathered write, then one answer.",
        axis: "message",
        metrics: vec![MB],
        limit: Limit::Flow,
        points: sizes(loads, "netty --batch 16 --size SIZE", "netty --batch 16 --conns 16 --size SIZE"),
    });
    all.extend(matrix.iter().filter(|_| !quick).map(|&size| Experiment {
        name: named(["netty-flow-16", "netty-flow", "netty-flow-64k"], size),
        title: format!("Event loops: throughput of {} by connections, flushed every 16", size_name(size)),
        what: "Sixteen messages in one gathered write, then one answer.",
        axis: "connections",
        metrics: vec![MB, RATE],
        limit: Limit::No,
        points: over(conns, size, &|n| {
            (format!("netty --batch 16 --size {size}"), format!("netty --batch 16 --size {size} --conns {n}"))
        }),
    }));
    all.extend(matrix.iter().map(|&size| Experiment {
        name: named(["netty-gather-16", "netty-gather", "netty-gather-64k"], size),
        title: format!("Event loops: gathered writes of {} messages", size_name(size)),
        what: "One connection; so many messages in one gathered write, then one answer.",
        axis: "messages in a write",
        metrics: vec![RATE],
        limit: Limit::No,
        points: over(&[64, 16, 4], size, &|n| {
            (format!("netty --batch {n} --size {size}"), format!("netty --batch {n} --size {size}"))
        }),
    }));
    all
}

fn pubsub(quick: bool) -> Vec<Experiment> {
    let some = pick(quick, &[32, K, 64 * K], &[32, 128, K, 4 * K, 16 * K, 64 * K]);
    vec![
        Experiment {
            name: "pubsub-subscribers",
            title: "Publish/subscribe: 1 KiB messages by subscribers".into(),
            what: "One publisher as fast as the broker takes it; the broker copies each message to every subscriber \
                   (after RocketBufs).",
            axis: "subscribers",
            metrics: vec![RATE, GOOD],
            limit: Limit::No,
            points: [0, 1, 2, 4]
                .iter()
                .map(|n| {
                    let c = format!("pubsub --size 1k --subscribers {n}");
                    Point { x: n.to_string(), size: K, pair: own("pubsub --size 1k", &c) }
                })
                .collect(),
        },
        Experiment {
            name: "pubsub-size",
            title: "Publish/subscribe: two subscribers by message size".into(),
            what: "What both subscribers got, in all.",
            axis: "message",
            metrics: vec![GOOD],
            limit: Limit::No,
            points: sizes(some, "pubsub --size SIZE", "pubsub --subscribers 2 --size SIZE"),
        },
        Experiment {
            name: "pubsub-rate",
            title: "Publish/subscribe: delivery at fixed rates, 1 KiB to two subscribers".into(),
            what: "The time from publication to arrival, and what that costs, when nobody is in a hurry.",
            axis: "messages per second",
            metrics: vec![P50, P99],
            limit: Limit::No,
            points: pick(quick, &[1000, 10_000], &[100, 1000, 5000, 20_000])
                .iter()
                .map(|r| {
                    let c = format!("pubsub --size 1k --subscribers 2 --rate {r}");
                    Point { x: r.to_string(), size: K, pair: own("pubsub --size 1k", &c) }
                })
                .collect(),
        },
        Experiment {
            name: "relay",
            title: "Live relay: one ingest of 64 KiB frames, two delivery servers, many viewers".into(),
            what: "A hundred frames a second, over two hops, to each viewer (after RocketBufs).",
            axis: "viewers",
            metrics: vec![P50, P99],
            limit: Limit::No,
            points: pick(quick, &[8], &[2, 8, 32])
                .iter()
                .map(|n| {
                    let c = format!("pubsub --size 64k --rate 100 --subscribers {n}");
                    Point { x: n.to_string(), size: 64 * K, pair: own("pubsub --size 64k --relays 2", &c) }
                })
                .collect(),
        },
    ]
}

fn broker(kind: Kind, quick: bool, secs: f64) -> Experiment {
    let (name, what, size) = match kind {
        Kind::Redis => ("redis", "Unmodified redis-server and redis-benchmark, values of 64 B.", 64),
        Kind::Memcached => ("memcached", "Unmodified memcached, values of 100 B, each compared.", 100),
        Kind::Mosquitto => ("mosquitto", "Unmodified mosquitto, messages of 100 B, each compared.", 100),
        Kind::Postgres => ("postgres", "Unmodified PostgreSQL, under its own user, and pgbench.", 100),
        Kind::Haproxy => {
            ("haproxy", "Unmodified HAProxy in HTTP mode before a page of its own of 4 KiB, and wrk.", 4 * K)
        }
        Kind::Nginx => ("nginx", "Unmodified nginx with one worker and sendfile, a file of 4 KiB, and wrk.", 4 * K),
    };
    let conns: &[usize] = match kind {
        Kind::Redis => pick(quick, &[1, 50], &[1, 8, 50, 200]),
        Kind::Nginx | Kind::Haproxy => pick(quick, &[1, 32], &[1, 8, 32, 128]),
        _ => pick(quick, &[1, 8], &[1, 4, 16, 40]),
    };
    Experiment {
        name,
        title: kind.title().into(),
        what,
        axis: "connections",
        metrics: vec![Metric { label: "requests per second", ..RATE }, P50],
        limit: Limit::No,
        points: conns
            .iter()
            .map(|&conns| {
                // As many as kernel TCP serves in about that time.
                let requests = (secs * if conns == 1 { 30_000.0 } else { 100_000.0 }) as u64;
                Point { x: conns.to_string(), size, pair: Box::new(Broker { kind, conns, size, requests }) }
            })
            .collect(),
    }
}

fn service(service: Service, quick: bool) -> Experiment {
    let (name, title, what) = service.texts();
    let size = 100;
    let point = |&conns: &usize| {
        let pair = Box::new(Served { service, conns, size });
        Point { x: conns.to_string(), size, pair }
    };
    Experiment {
        name,
        title: title.into(),
        what,
        axis: "connections",
        metrics: vec![Metric { label: "requests per second", ..RATE }, P50],
        limit: Limit::No,
        points: pick(quick, &[1, 8], &[1, 4, 16]).iter().map(point).collect(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_unique_and_every_experiment_has_points() {
        for quick in [true, false] {
            let all = super::all(quick, 1.0);
            let mut names: Vec<_> = all.iter().map(|e| e.name).collect();
            assert!(all.iter().all(|e| !e.points.is_empty() && !e.metrics.is_empty()));
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all.len());
        }
    }
}
