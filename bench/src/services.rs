//! Real servers under clients of ours, which check every message: those that speak a protocol of their own, or
//! need more than a command to start.

use crate::brokers::{find, program, write};
use crate::pairs::{free_port, load_words, parse_ok, Lab, Pair, Start, Stop, Values};
use std::path::Path;
use std::process::Command;

/// The servers that are known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Service {
    /// nats-server, written in Go: it stays on TCP, which must not harm it.
    Nats,
    /// RabbitMQ (Erlang), by its STOMP plugin.
    RabbitMq,
    /// ActiveMQ (JVM), by STOMP on its NIO transport.
    ActiveMq,
    /// ZooKeeper (JVM).
    ZooKeeper,
}

/// Such a server with its load.
pub struct Served {
    /// Which.
    pub service: Service,
    /// Connections of the load, or pairs of connections.
    pub conns: usize,
    /// Bytes of a message.
    pub size: usize,
}

const ACTIVEMQ: &str = "/usr/share/activemq/bin/activemq.jar";
const ZOOKEEPER: &str = "/usr/share/java/zookeeper.jar";
const ZOOKEEPER_CONF: &str = "/etc/zookeeper/conf";
/// A JVM that was told to end by SIGTERM says so.
const JVM_CLEAN: &[i32] = &[0, 143];

impl Service {
    /// All of them.
    pub const ALL: [Service; 4] = [Service::Nats, Service::RabbitMq, Service::ActiveMq, Service::ZooKeeper];

    /// The experiment's name, its title, and what is run.
    pub fn texts(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Service::Nats => (
                "nats",
                "NATS: a message published and received",
                "Unmodified nats-server, which is written in Go and calls the kernel itself: it cannot be accelerated, \
                 and must not be slowed down. Messages of 100 B, each compared.",
            ),
            Service::RabbitMq => (
                "rabbitmq",
                "RabbitMQ: a message published and received (STOMP)",
                "Unmodified RabbitMQ with its STOMP plugin, messages of 100 B, each compared.",
            ),
            Service::ActiveMq => (
                "activemq",
                "ActiveMQ: a message published and received (STOMP)",
                "Unmodified ActiveMQ on a JVM, STOMP on its NIO transport, messages of 100 B, each compared.",
            ),
            Service::ZooKeeper => (
                "zookeeper",
                "ZooKeeper: nine reads for a write",
                "One unmodified ZooKeeper server on a JVM, ephemeral nodes of 100 B, each read compared.",
            ),
        }
    }

    /// Whether its start takes seconds.
    pub fn is_heavy(self) -> bool {
        self != Service::Nats
    }

    fn programs(self) -> &'static [&'static str] {
        match self {
            Service::Nats => &["nats-server"],
            Service::RabbitMq => &["rabbitmq-server", "epmd"],
            Service::ActiveMq => &["java", "activemq"],
            Service::ZooKeeper => &["java"],
        }
    }

    fn client(self) -> &'static str {
        match self {
            Service::Nats => "nats",
            Service::RabbitMq | Service::ActiveMq => "stomp",
            Service::ZooKeeper => "zookeeper",
        }
    }
}

fn made(dir: &Path) -> Result<(), String> {
    std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))
}

/// A folder for this start alone.
fn fresh(lab: &Lab, name: &str) -> Result<std::path::PathBuf, String> {
    let dir = lab.dir.join(name);
    let _ = std::fs::remove_dir_all(&dir);
    made(&dir)?;
    Ok(dir)
}

fn rabbitmq(lab: &Lab, host: &str, port: u16) -> Result<Command, String> {
    let dir = fresh(lab, "rabbitmq")?;
    let (amqp, dist, names) = (free_port(host)?, free_port("127.0.0.1")?, free_port("127.0.0.1")?);
    write(&dir.join("plugins"), "[rabbitmq_stomp].\n")?;
    let conf = format!("stomp.listeners.tcp.1 = {host}:{port}\nloopback_users = none\nlog.file = false\n");
    write(&dir.join("rabbitmq.conf"), &conf)?;
    // The daemon of names outlives every node, so it is ended with this one.
    let mut c = Command::new("sh");
    c.arg("-c").arg(
        "epmd -port \"$ERL_EPMD_PORT\" -address 127.0.0.1 & names=$!\n\
         \"$1\" & server=$!\n\
         trap 'kill \"$server\"' TERM\n\
         wait \"$server\"; wait \"$server\"; status=$?\n\
         kill \"$names\"; wait \"$names\"\n\
         exit \"$status\"",
    );
    // Debian's wrapper in PATH wants root to become another user.
    let plain = Path::new("/usr/lib/rabbitmq/bin/rabbitmq-server");
    c.arg("sh").arg(if plain.exists() { plain.into() } else { find("rabbitmq-server").ok_or("not installed")? });
    c.env("HOME", &dir).env("RABBITMQ_MNESIA_BASE", dir.join("mnesia")).env("RABBITMQ_LOG_BASE", dir.join("logs"));
    c.env("RABBITMQ_PID_FILE", dir.join("pid")).env("RABBITMQ_ENABLED_PLUGINS_FILE", dir.join("plugins"));
    c.env("RABBITMQ_CONFIG_FILE", dir.join("rabbitmq")).env("RABBITMQ_CONF_ENV_FILE", "/dev/null");
    c.env("RABBITMQ_NODENAME", format!("rs{port}@localhost")).env("RABBITMQ_NODE_IP_ADDRESS", host);
    c.env("RABBITMQ_NODE_PORT", amqp.to_string()).env("RABBITMQ_DIST_PORT", dist.to_string());
    c.env("ERL_EPMD_PORT", names.to_string()).env("RABBITMQ_LOGS", "-");
    Ok(c)
}

fn activemq(lab: &Lab, host: &str, port: u16) -> Result<Command, String> {
    let dir = fresh(lab, "activemq")?;
    if !Path::new(ACTIVEMQ).exists() {
        return Err(format!("{ACTIVEMQ} is not there"));
    }
    let place = dir.display();
    write(
        &dir.join("activemq.xml"),
        &format!(
            r#"<beans xmlns="http://www.springframework.org/schema/beans"
  xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
  xsi:schemaLocation="http://www.springframework.org/schema/beans
    http://www.springframework.org/schema/beans/spring-beans.xsd
    http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="rs{port}" persistent="false" useJmx="false"
    dataDirectory="{place}/data" schedulerSupport="false">
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp+nio://{host}:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"#
        ),
    )?;
    let mut c = program("java")?;
    c.args(["-Xmx512m", "-Dactivemq.home=/usr/share/activemq"]);
    c.args(["base", "conf", "data"].map(|w| format!("-Dactivemq.{w}={place}")));
    c.args(["-jar", ACTIVEMQ, "start"]).arg(format!("xbean:file:{place}/activemq.xml"));
    Ok(c)
}

fn zookeeper(lab: &Lab, host: &str, port: u16) -> Result<Command, String> {
    let dir = fresh(lab, "zookeeper")?;
    if !Path::new(ZOOKEEPER).exists() {
        return Err(format!("{ZOOKEEPER} is not there"));
    }
    let conf = format!(
        "tickTime=2000\ndataDir={}\nclientPort={port}\nclientPortAddress={host}\nadmin.enableServer=false\n\
         forceSync=no\nmaxClientCnxns=0\n",
        dir.display()
    );
    write(&dir.join("zoo.cfg"), &conf)?;
    let mut c = program("java")?;
    c.args(["-Xmx512m", "-cp", &format!("{ZOOKEEPER_CONF}:{ZOOKEEPER}")]);
    c.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain").arg(dir.join("zoo.cfg"));
    Ok(c)
}

impl Pair for Served {
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String> {
        let port = free_port(host)?;
        let (command, signal, clean): (_, _, &[i32]) = match self.service {
            Service::Nats => {
                let mut c = program("nats-server")?;
                c.args(["-a", host, "-p", &port.to_string()]);
                (c, libc::SIGINT, &[0, 1])
            }
            Service::RabbitMq => (rabbitmq(lab, host, port)?, libc::SIGTERM, &[0]),
            Service::ActiveMq => (activemq(lab, host, port)?, libc::SIGTERM, JVM_CLEAN),
            Service::ZooKeeper => (zookeeper(lab, host, port)?, libc::SIGTERM, JVM_CLEAN),
        };
        Ok(Start { command, port: Some(port), stop: Stop::Signal(signal), clean })
    }

    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command {
        let (size, conns) = (self.size.to_string(), self.conns.to_string());
        let words = ["load-client", self.service.client(), "--size", &size, "--conns", &conns];
        let mut words = words.map(String::from).to_vec();
        words.extend(load_words(lab, host, port));
        if self.service.is_heavy() {
            // A virtual machine translates what it runs often; the last word holds.
            words.extend(["--warm", "4"].map(String::from));
        }
        lab.own(&words)
    }

    fn programs(&self) -> (&'static [&'static str], &'static [&'static str]) {
        (self.service.programs(), &[])
    }

    fn parse(&self, said: &str) -> Result<Values, String> {
        parse_ok(said)
    }
}
