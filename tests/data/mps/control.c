/* Sends a command to the daemon of fake_mps_control.py and prints its answer, without the start of a Python for each command. It leaves
 * the rest to the fake: all but commands and -h, and all of a behaviour that is the control program's own.
 *
 * Compiled with -DPYTHON="..." and -DFAKE="...". Protocol 2 takes commands on standard input, protocol 3 as arguments. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ANSWER_BYTES (1 << 20)

#define HELP "usage: nvidia-cuda-mps-control [options]\n -d, --daemon\n -f, --foreground\n -v\n"
#define MULTIUSER(option) " " option "  Enable multi-user mode\n"
#define HELP_3 " -p, --protocol <2|3>\n -q, --quit\nModules: server, namespace, client, device\n"

/* Whether the file of behaviours has one of those that the program itself has. */
static int is_special(void)
{
    static const char *const special[] = {"\"hang\"", "\"garbage\"", "\"protocols\"", "\"multiuser\""};
    const char *path = getenv("FAKE_MPS_BEHAVIOUR");
    char text[4096] = "";
    FILE *file = path ? fopen(path, "r") : NULL;

    if (file) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    for (size_t i = 0; i < sizeof special / sizeof *special; i++)
        if (strstr(text, special[i]))
            return 1;
    return getenv("FAKE_MPS_AS_USER") != NULL;
}

static int is_talk(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "attach"))
        return 0;
    for (int i = 1; i < argc; i++)
        if (argv[i][0] == '-' && strcmp(argv[i], "-q") && strncmp(argv[i], "--", 2))
            return 0;
    return 1;
}

static int connect_to(const char *name)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    snprintf(to.sun_path, sizeof to.sun_path, "%s/%s", folder ? folder : "/tmp/nvidia-mps", name);
    return fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) ? -1 : fd;
}

static FILE *connection(void)
{
    int fd = connect_to("control_privileged");

    if (fd < 0 && (fd = connect_to("control")) < 0) {
        puts("Cannot find MPS control daemon process");
        exit(1);
    }
    FILE *daemon = fdopen(fd, "r+");
    setvbuf(daemon, NULL, _IOFBF, ANSWER_BYTES); /* the rest of a packet is lost */
    return daemon;
}

/* The JSON text of the answer, up to its closing quote; only what Python's json escapes in such texts. */
static void print_text(const char *at)
{
    int printed = 0;

    for (; *at && *at != '"'; at++, printed = 1) {
        if (*at == '\\')
            at++;
        putchar(at[-1] == '\\' && *at == 'n' ? '\n' : *at);
    }
    if (printed)
        putchar('\n');
}

static void talk(char **words, int count)
{
    static char answer[ANSWER_BYTES];
    FILE *daemon = connection();
    const char *status, *text;

    fputs("{\"words\": [", daemon);
    for (int i = 0; i < count; i++)
        fprintf(daemon, "%s\"%s\"", i ? ", " : "", words[i]);
    fputs("]}\n", daemon);
    fflush(daemon);
    if (!fgets(answer, sizeof answer, daemon) || !(status = strstr(answer, "\"status\": ")) || !(text = strstr(answer, "\"text\": \""))) {
        puts("Connection to the control daemon was lost");
        exit(1);
    }
    print_text(text + 9);
    if (atoi(status + 10))
        exit(atoi(status + 10));
    fclose(daemon);
}

int main(int argc, char **argv)
{
    char line[4096], *words[64], *quit[] = {"quit"};

    if (argc > 1 && !strcmp(argv[argc - 1], "-h") && !is_special()) {
        fputs(argc == 2 ? HELP MULTIUSER("--multiuser-server") : HELP MULTIUSER("--multiuser") HELP_3, stdout);
        return 0;
    }
    if (!is_talk(argc, argv) || is_special()) {
        char *command[64] = {PYTHON, "-S", "-E", FAKE};
        for (int i = 1; i < argc && i < 59; i++)
            command[3 + i] = argv[i];
        execv(PYTHON, command);
        return 127;
    }
    if (argc > 1) {
        int quits = !strcmp(argv[1], "-q");
        talk(quits ? quit : argv + 1, quits ? 1 : argc - 1);
        return 0;
    }
    while (fgets(line, sizeof line, stdin)) {
        int count = 0;
        for (char *word = strtok(line, " \n"); word && count < 64; word = strtok(NULL, " \n"))
            words[count++] = word;
        if (count)
            talk(words, count);
    }
    return 0;
}
