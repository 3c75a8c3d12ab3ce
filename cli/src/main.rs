//! The `ringsock` command: run programs preloaded, look at them, and find out
//! what a host can do.

mod bench;
mod check;
mod host;
mod library;
mod off;
mod program;
mod run;
mod stat;
mod state;
mod table;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// TCP connections of unmodified programs over shared-memory rings.
#[derive(Parser)]
#[command(name = "ringsock", version, propagate_version = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  ringsock check                             what this host can do
  ringsock run -- redis-server               run a program preloaded
  ringsock run --summary -- redis-benchmark  and say at the end what was gained
  ringsock stat                              live connections of preloaded processes
  ringsock off 1234                          take a process off rings; `on` lets it back
  ringsock bench --quick                     what it gains on this host, as a page of charts";

#[derive(Subcommand)]
enum Command {
    /// Run a program with libringsock.so preloaded
    Run(Box<run::Args>),
    /// Show the connections of preloaded processes
    Stat(stat::Args),
    /// Take the connections of running processes back to TCP
    Off(off::Args),
    /// Let them leave TCP again
    On(off::Args),
    /// Say what this host can do, and why not more
    Check(check::Args),
    /// Measure programs with and without the library, and write a report
    Bench(Box<bench::Args>),
    /// One of the programs that `bench` measures
    #[command(name = bench::PROGRAM, hide = true, disable_help_flag = true)]
    Program {
        /// What it does
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// The agent of `bench --peer` on the other host
    #[command(name = bench::AGENT, hide = true)]
    Agent,
    /// Say whether the library is in this very process (used by `check`)
    #[command(name = "__loaded", hide = true)]
    Loaded,
}

fn main() -> ExitCode {
    // A reader that goes away (`ringsock stat | head`) ends us quietly, as other commands.
    // SAFETY: sets a default disposition before there are threads.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Off(args) => off::off(&args),
        Command::On(args) => off::on(&args),
        Command::Check(args) => check::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Agent => bench::agent(),
        Command::Program { words } => {
            let code = ringsock_bench::program(&words).unwrap_or(2);
            // The ordinary end: exit handlers run, the library reports.
            std::process::exit(code)
        }
        Command::Loaded => return library::loaded_here(),
    };
    result.unwrap_or_else(|message| {
        eprintln!("ringsock: {message}");
        ExitCode::from(2)
    })
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;
    use ringsock_core::config::SETTINGS;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_setting_is_an_option_of_run() {
        let mut cli = Cli::command();
        let run = cli.find_subcommand_mut("run").unwrap();
        for s in SETTINGS {
            let long = s.env.trim_start_matches("RINGSOCK_").to_lowercase().replace('_', "-");
            assert!(run.get_arguments().any(|a| a.get_long() == Some(&long)), "--{long}");
        }
    }
}
