//! The command line, and the only place that writes to standard output.

use std::{
    error::Error,
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{
    config::{self, Config, LogFormat},
    demo, key_file,
    keys::{ApiKey, KeyId},
    logging,
    process::{self, Addresses, Ending},
};

/// The time to drain ran out.
const EXIT_CUT: u8 = 3;

/// A second signal ended everything at once.
const EXIT_STOPPED: u8 = 4;

/// A health check takes no longer.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// A TLS reverse proxy for LLM APIs: API keys, exact sliding-window limits, streaming answers.
///
/// Ends with 0 after everything was finished, 1 if it could not start, 2 for a wrong command line, 3 if the time to
/// drain ran out, 4 after a second signal.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = false)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The configuration file
    #[arg(
        long,
        short,
        global = true,
        env = "TOLLGATE_CONFIG",
        default_value = "proxy.toml",
        value_name = "FILE"
    )]
    config: PathBuf,
    /// What to log, in place of the file's [log] level
    #[arg(long, global = true, env = "TOLLGATE_LOG", value_name = "LEVEL", value_parser = ["off", "error", "warn", "info", "debug", "trace"])]
    log_level: Option<String>,
    /// How to log, in place of the file's [log] format
    #[arg(long, global = true, env = "TOLLGATE_LOG_FORMAT", value_name = "FORMAT")]
    log_format: Option<Format>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve (the default)
    Serve,
    /// Check the configuration file, and report everything that is wrong with it
    Check,
    /// Make API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Try it: a made-up LLM, a fresh key and lines to paste, all on this machine
    Demo(DemoArguments),
    /// Ask the running process whether it is ready, for a container's health check
    Health,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Make a key; its secret is shown once
    New {
        /// The public name: it stands in logs, metrics and Redis
        #[arg(long)]
        id: KeyId,
        /// The tier whose limits hold
        #[arg(long)]
        tier: String,
        /// Add it to the configuration file
        #[arg(long)]
        write: bool,
    },
    /// Print the hash of a secret of your own, which is read from standard input
    Hash,
}

#[derive(Args)]
struct DemoArguments {
    /// A real upstream in place of the made-up one
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// The environment variable that holds the real upstream's key
    #[arg(long, value_name = "NAME", requires = "upstream")]
    key_env: Option<String>,
    /// Count in Redis in place of memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
    /// The port to listen on; another one is taken if it is in use
    #[arg(long, default_value_t = 8443)]
    port: u16,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl Arguments {
    fn load(&self) -> Result<Config, config::problems::Problems> {
        config::load(&self.config)
    }

    fn log_format(&self, configured: LogFormat) -> LogFormat {
        match self.log_format {
            Some(Format::Text) => LogFormat::Text,
            Some(Format::Json) => LogFormat::Json,
            None => configured,
        }
    }
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match &arguments.command {
        None | Some(Command::Serve) => serve(&arguments),
        Some(Command::Check) => check(&arguments),
        Some(Command::Key(KeyCommand::New { id, tier, write })) => new_key(&arguments, id, tier, *write),
        Some(Command::Key(KeyCommand::Hash)) => hash_key(),
        Some(Command::Demo(demo)) => run_demo(&arguments, demo),
        Some(Command::Health) => health(&arguments),
    };
    done.unwrap_or_else(|error| {
        report(&*error);
        ExitCode::FAILURE
    })
}

type Done = Result<ExitCode, Box<dyn Error>>;

fn serve(arguments: &Arguments) -> Done {
    let config = arguments.load()?;
    let level = arguments.log_level.as_ref().unwrap_or(&config.log.level);
    let _logging = logging::start(level, arguments.log_format(config.log.format))?;
    Ok(exit_code(process::run(|| arguments.load(), |_| {})?))
}

fn check(arguments: &Arguments) -> Done {
    let config = arguments.load()?;
    print(format_args!(
        "{} is good: {} tiers, {} keys, {} upstreams\n",
        arguments.config.display(),
        config.tiers.len(),
        config.keys.len(),
        config.upstreams.len()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn new_key(arguments: &Arguments, id: &KeyId, tier: &str, write: bool) -> Done {
    let key = key_file::make(id);
    if write {
        key_file::append(&arguments.config, &key, tier)?;
    }
    let file = arguments.config.display();
    let what_next = if write {
        format!("# Added to {file}; a running Tollgate reads it after SIGHUP:")
    } else {
        format!("# Add these lines to {file} (or let --write do it):")
    };
    print(format_args!(
        "# The secret of {id}. It is shown this once and stored nowhere:\n{}\n\n{what_next}\n{}",
        key.secret(),
        key.toml_lines(tier),
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn hash_key() -> Done {
    let mut secret = String::new();
    io::stdin().read_to_string(&mut secret)?;
    let secret = secret.trim_end_matches(['\r', '\n']);
    let long_enough = secret.len() >= 32 && !secret.contains(char::is_whitespace);
    let key = ApiKey::new(secret).filter(|_| long_enough);
    let key =
        key.ok_or("a secret is one word of 32 to 512 characters; `tollgate key new` makes a good one")?;
    print(format_args!("{}\n", key.hash()))?;
    Ok(ExitCode::SUCCESS)
}

fn run_demo(arguments: &Arguments, demo: &DemoArguments) -> Done {
    let level = arguments.log_level.as_deref().unwrap_or("info");
    let _logging = logging::start(level, arguments.log_format(LogFormat::Text))?;
    let stage = demo::Stage::set(&demo::Wishes {
        upstream: demo.upstream.as_deref(),
        key_env: demo.key_env.as_deref(),
        redis: demo.redis.as_deref(),
        port: demo.port,
    })?;
    let invite = |addresses: &Addresses| {
        // Whoever reads no more of it, as `head` does, may still want the demo.
        let _ = print(format_args!("{}\n", stage.invitation(addresses)));
    };
    Ok(exit_code(process::run(|| Ok(stage.config.clone()), invite)?))
}

fn exit_code(ending: Ending) -> ExitCode {
    match ending {
        Ending::Drained => ExitCode::SUCCESS,
        Ending::Cut => ExitCode::from(EXIT_CUT),
        Ending::Stopped => ExitCode::from(EXIT_STOPPED),
    }
}

fn health(arguments: &Arguments) -> Done {
    let config = arguments.load()?;
    let admin =
        config.admin.ok_or("the admin listener is off, so nobody can tell; set `[admin] enabled = true`")?;
    let address = reachable(admin.listen);
    let mut stream = TcpStream::connect_timeout(&address, HEALTH_TIMEOUT)
        .map_err(|error| format!("nothing answers on {address}: {error}"))?;
    stream.set_read_timeout(Some(HEALTH_TIMEOUT))?;
    write!(stream, "GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let is_ready = answer.starts_with("HTTP/1.1 200 ");
    // The exit code is the answer, whether or not somebody reads the word.
    let _ = print(format_args!("{}\n", if is_ready { "ready" } else { "not ready" }));
    Ok(if is_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where this machine reaches a listener: one that listens everywhere is reached on loopback.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// Writes to standard output. Its reader may have left or its disk be full, on which `println!` would panic.
fn print(text: fmt::Arguments<'_>) -> Result<(), String> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_fmt(text)
        .and_then(|()| stdout.flush())
        .map_err(|error| format!("can't write to standard output: {error}"))
}

/// Writes an error and its causes, but for those that the error itself quotes.
fn report(error: &dyn Error) {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = inner.source();
    }
    // There is nobody left to tell if standard error is closed.
    let _ = writeln!(io::stderr(), "tollgate: {text}");
}
